"""Checkpoints of an unfinished stage. Lightning writes and reads them; this module checks that they are whole and of this run."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.plugins.io import TorchCheckpointIO

from nemo_style_rlhf.checkpoint.data import read_data
from nemo_style_rlhf.checkpoint.files import published, storage_errors
from nemo_style_rlhf.checkpoint.starts import DONE, differences, require_same
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch.preemption import Preempted, heed_sigterm, stop_requested
from nemo_style_rlhf.schema.supervised import SupervisedConfig
from nemo_style_rlhf.tracking.metrics import EVENTS_FILE, METRICS_FILE, last_recorded

log = logging.getLogger(__name__)

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


def require_no_lost_results(config: SupervisedConfig) -> None:
    """Raise UserError if there are results but no checkpoint to continue from, and they are another command's."""
    output_dir = Path(config.run.output_dir)
    if _results(config) and (changed := differences(output_dir, config)) != []:
        raise UserError(
            f"{output_dir} holds results of {_trained(output_dir)} but no checkpoint to go on from, and this start would replace "
            f"them with others ({'; '.join(changed or ['its configuration is not known'])}): choose another run.output_dir"
        )


def set_results_aside(config: SupervisedConfig) -> None:
    """Move the results of a start that left no checkpoint into a folder next to them, and log it: the stage starts anew.

    Raises:
        StorageError: the disk refused.
    """
    output_dir = Path(config.run.output_dir)
    if not (found := _results(config)):
        return
    number = 1 + len(list(output_dir.glob("earlier_*")))
    aside = output_dir / f"earlier_{number:03d}"
    log.warning(
        "%s holds results of %s but no checkpoint: the stage starts from the beginning, they are now in %s", output_dir,
        _trained(output_dir), aside,
    )  # fmt: skip
    with storage_errors(aside):
        aside.mkdir()
        for path in found:
            path.rename(aside / path.name)


def _results(config: SupervisedConfig) -> list[Path]:
    """Files that earlier starts wrote for their user; none if they trained nothing."""
    output_dir, export = Path(config.run.output_dir), Path(config.export_path)
    exports = [path for path in (export, export.with_name(f"{export.name}_adapter")) if path.parent == output_dir]
    found = [path for path in exports if path.exists()]
    if not found and last_recorded(output_dir) is None:
        return []
    names = (METRICS_FILE, EVENTS_FILE, "tensorboard", "pair_evaluation.json", DONE)
    return [*found, *(path for name in names if (path := output_dir / name).exists())]


def _trained(output_dir: Path) -> str:
    last = last_recorded(output_dir)
    return "an export" if last is None else f"{last + 1} steps"  # Lightning's steps count from 0


def completed_steps(path: Path, identity: dict[str, Any]) -> int:
    """Number of optimizer steps that were done when the checkpoint was written.

    Raises:
        UserError: the checkpoint is from a run with another model, data, batches or seed, or holds something other than data.
    """
    file = path / PROGRESS_FILE if path.is_dir() else path
    checkpoint = read_data(file, mmap=True)
    require_same(checkpoint.get(IDENTITY, {}), identity, str(path))
    return int(checkpoint["global_step"])


def recount_micro_batches(checkpoint: dict[str, Any], *, per_step: int) -> None:
    """Convert Lightning's position in ``checkpoint``, counted in micro-batches, to another number of them per step: a run that
    was made longer may have a fuller step."""
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    shift = checkpoint["global_step"] * per_step - progress["current"]["processed"]
    for counts in (progress["current"], progress["total"]):
        for name in counts:
            counts[name] += shift


class StageCheckpoints(pl.Callback):
    """Saves when ``checkpoint.save_interval`` says so, after the last step, and after the step in which the stage is asked to
    stop (launch/preemption.py). It then ends the stage with :class:`Preempted`."""

    def __init__(self, config: SupervisedConfig, total_steps: int) -> None:
        self._folder, self._config, self._total_steps = checkpoint_dir(config), config.checkpoint, total_steps
        self._step = 0
        self._told = False

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._step = trainer.global_step
        heed_sigterm()  # Lightning's own handler ends without a checkpoint

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == self._step:
            return  # a micro-batch within the step
        self._step = step = trainer.global_step
        is_last = step == self._total_steps
        # The request to stop may not have reached every rank yet.
        self._told = trainer.strategy.reduce_boolean_decision(stop_requested(), all=False) and not is_last
        if self._config.save_interval and (self._told or is_last or self._config.is_due(step)):
            trainer.save_checkpoint(self._folder / f"step_{step:08d}.ckpt")
            if trainer.is_global_zero:
                self._retire()

    def on_train_batch_start(self, *_: Any) -> None:
        if self._told:  # only now: Lightning has written the step's metrics
            saved = "is saved" if self._config.save_interval else "is not saved, since checkpoint.save_interval=0"
            log.info("step %d %s, the stage ends as it was told; the same command goes on", self._step, saved)
            raise Preempted

    def _retire(self) -> None:
        for path in sorted(self._folder.glob("step_*.ckpt"))[: -self._config.keep_last]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


class AtomicCheckpointIO(TorchCheckpointIO):
    """Gives a checkpoint its name only once it is complete on the disk."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        with storage_errors(path), published(Path(path)) as beside:
            super().save_checkpoint(checkpoint, beside, storage_options)
