"""Writes metrics: always to metrics.jsonl, and if configured to TensorBoard and W&B, through Lightning's loggers."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_style_rlhf.checkpoint.files import storage_errors, write_atomically
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.tracking import TrackingConfig

METRICS_FILE = "metrics.jsonl"
log = logging.getLogger(__name__)


class MetricsWriter:
    """Appends one JSON object per step; a resume removes the lines of steps that are repeated."""

    def __init__(self, output_dir: Path, config: TrackingConfig, resolved: dict[str, Any]) -> None:
        """``resolved`` is the run's whole configuration, which the loggers show as hyperparameters."""
        output_dir.mkdir(parents=True, exist_ok=True)
        self._path = output_dir / METRICS_FILE
        self._loggers = _loggers(output_dir, config)
        for logger in self._loggers:
            logger.log_hyperparams(resolved)

    def rewind(self, step: int) -> None:
        """Remove all lines written after that of ``step``, since what they describe will be repeated, and damaged lines. A line
        about an earlier step may be among them, if it was written late.

        Raises:
            UserError: the file cannot be read or written, or something other than a file has its name.
        """
        try:
            lines = self._path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return
        except OSError as error:
            raise UserError(
                f"{self._path} cannot be read ({error.strerror}): move it away, or make it a file that you can read and write"
            ) from error
        lines = [stripped for line in lines if (stripped := line.strip())]
        steps = [_step_of(line) for line in lines]
        if damaged := steps.count(None):
            log.warning("%s: damaged lines left out, %d of %d", self._path, damaged, len(lines))
        end = steps.index(step) + 1 if step in steps else len(lines)
        kept = [line for line, its in zip(lines[:end], steps) if its is not None and its <= step]
        with storage_errors(self._path):
            write_atomically(self._path, b"".join(line + b"\n" for line in kept))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """
        Raises:
            StorageError: the disk refused metrics.jsonl.
        """
        with storage_errors(self._path), self._path.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        for logger in self._loggers:
            logger.log_metrics(dict(metrics), step=step)
            logger.save()

    def close(self) -> None:
        for logger in self._loggers:
            logger.finalize("success")


def _step_of(line: bytes) -> int | None:
    """The step of a line; None if the line is damaged, for example cut short by a crash."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return step if type(step) is int else None  # True is an int, too


def _loggers(output_dir: Path, config: TrackingConfig) -> list[Any]:
    loggers: list[Any] = []
    if config.tensorboard:
        from pytorch_lightning.loggers import TensorBoardLogger

        loggers.append(TensorBoardLogger(str(output_dir), name="tensorboard", version=""))
    if config.wandb.enabled:
        from pytorch_lightning.loggers import WandbLogger

        loggers.append(
            WandbLogger(
                project=config.wandb.project,
                entity=config.wandb.entity,
                group=config.wandb.group,
                name=config.wandb.name,
                save_dir=str(output_dir),
                offline=config.wandb.offline,
            )
        )
    return loggers
