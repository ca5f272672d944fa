"""Checkpoints of an unfinished stage. Lightning writes and reads them; this module checks that they are whole and of this run."""

from pathlib import Path
from typing import Any

from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.io import TorchCheckpointIO

from nemo_style_rlhf.checkpoint.data import read_data
from nemo_style_rlhf.checkpoint.files import published, storage_errors
from nemo_style_rlhf.checkpoint.starts import require_same
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.supervised import SupervisedConfig

IDENTITY = "stage_identity"
PROGRESS_FILE = "progress.pt"
"""File in a checkpoint that is a folder, with the identity and progress of the run."""


def checkpoint_dir(config: SupervisedConfig) -> Path:
    return Path(config.run.output_dir) / "checkpoints"


def last_checkpoint(config: SupervisedConfig) -> Path | None:
    """The checkpoint from which ``run.resume`` lets the run start; None starts from the beginning.

    Raises:
        UserError: there are checkpoints and ``run.resume`` is never, or there are none and it is must.
    """
    found = sorted(checkpoint_dir(config).glob("step_*.ckpt"))
    if found and config.run.resume == "never":
        raise UserError(
            f"{checkpoint_dir(config)} holds checkpoints but run.resume=never: choose another run.output_dir, or run.resume=auto"
        )
    if not found and config.run.resume == "must":
        raise UserError(f"run.resume=must but there is no checkpoint in {checkpoint_dir(config)}")
    return found[-1] if found else None


def saved_steps(config: SupervisedConfig) -> list[int]:
    """Optimizer steps whose checkpoints exist, in order."""
    return sorted(int(path.stem.removeprefix("step_")) for path in checkpoint_dir(config).glob("step_*.ckpt"))


def completed_micro_batches(path: Path, identity: dict[str, Any]) -> int:
    """Number of micro-batches per rank that were done when the checkpoint was written.

    Raises:
        UserError: the checkpoint is from a run with another model, data, batches or seed, or holds something other than data.
    """
    file = path / PROGRESS_FILE if path.is_dir() else path
    checkpoint = read_data(file, mmap=True)
    require_same(checkpoint.get(IDENTITY, {}), identity, str(path))
    return int(checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["processed"])


def checkpoint_callback(config: SupervisedConfig, total_steps: int) -> ModelCheckpoint:
    interval = config.checkpoint.save_interval
    return ModelCheckpoint(
        dirpath=checkpoint_dir(config),
        filename="step_{step:08d}",
        auto_insert_metric_name=False,
        every_n_train_steps=total_steps if interval == -1 else interval,
        monitor="step",
        mode="max",
        save_top_k=config.checkpoint.keep_last,
    )


class AtomicCheckpointIO(TorchCheckpointIO):
    """Gives a checkpoint its name only once it is complete on the disk."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        with storage_errors(path), published(Path(path)) as beside:
            super().save_checkpoint(checkpoint, beside, storage_options)
