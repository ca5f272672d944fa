"""Writes metrics: always to metrics.jsonl, and if configured to TensorBoard and W&B, through Lightning's loggers. Other events of
a run, such as its starts and failed health checks, go to events.jsonl."""

import json
import logging
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_style_rlhf.checkpoint.files import storage_errors, write_atomically
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.tracking import TrackingConfig

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
WANDB_ID_FILE = "wandb_id"
TIME = "clock/time"
"""Seconds since 1970 at which a line was written. All metrics in ``clock/`` are times; a resumed run does not repeat them."""
log = logging.getLogger(__name__)


class MetricsWriter:
    """Appends one JSON object per step; a resume removes the lines of steps that are repeated."""

    def __init__(self, output_dir: Path, config: TrackingConfig, resolved: dict[str, Any]) -> None:
        """``resolved`` is the run's whole configuration. The loggers show it as hyperparameters."""
        output_dir.mkdir(parents=True, exist_ok=True)
        self._path = output_dir / METRICS_FILE
        self._events = output_dir / EVENTS_FILE
        self._output_dir, self._tensorboard = output_dir, _tensorboard(output_dir) if config.tensorboard else None
        self._loggers = [*filter(None, [self._tensorboard]), *_wandb(output_dir, config)]
        for logger in self._loggers:
            logger.log_hyperparams(resolved)

    def rewind(self, step: int) -> None:
        """Remove damaged lines, and all lines written after the line of ``step``: what they describe will be repeated. A line
        about an earlier step may be among them, if it was written late.

        Raises:
            UserError: a file cannot be read or written, or something other than a file has its name.
        """
        if (found := _lines(self._path)) is not None:
            lines, steps = found
            end = steps.index(step) + 1 if step in steps else len(lines)
            _keep(self._path, lines[:end], steps, step)
            if self._tensorboard is not None and lines:
                self._tensorboard.finalize("")
                place = self._loggers.index(self._tensorboard)
                self._tensorboard = self._loggers[place] = _tensorboard(self._output_dir, purge_step=step + 1)
        if (found := _lines(self._events)) is not None:
            _keep(self._events, *found, step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics; raises StorageError if the disk refuses metrics.jsonl."""
        _append(self._path, {"step": step, TIME: time.time(), **metrics})
        for logger in self._loggers:
            logger.log_metrics(dict(metrics), step=step)
            logger.save()

    def event(self, step: int, kind: str, sentence: str, **facts: float | str) -> None:
        """Append an event to events.jsonl.

        Args:
            kind: such as ``start`` or ``health``.
            sentence: for the reader.

        Raises:
            StorageError: the disk refused events.jsonl.
        """
        _append(self._events, {"step": step, TIME: time.time(), "kind": kind, "sentence": sentence, **facts})

    def close(self) -> None:
        for logger in self._loggers:
            logger.finalize("success")


def last_recorded(output_dir: Path) -> int | None:
    """The last step with metrics in ``output_dir``; None if there are none."""
    _, steps = _lines(output_dir / METRICS_FILE) or ([], [])
    return max((step for step in steps if step is not None), default=None)


def _append(path: Path, line: Mapping[str, float | str]) -> None:
    with storage_errors(path), path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _lines(path: Path) -> tuple[list[bytes], list[int | None]] | None:
    """The lines of a file, and the step of each; None if there is no file."""
    try:
        lines = [stripped for line in path.read_bytes().split(b"\n") if (stripped := line.strip())]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}): move it away, or make it a file that you can read and write"
        ) from error
    steps = [_step_of(line) for line in lines]
    if damaged := steps.count(None):
        log.warning("%s: damaged lines left out, %d of %d", path, damaged, len(lines))
    return lines, steps


def _keep(path: Path, lines: list[bytes], steps: list[int | None], last: int) -> None:
    """Leave only the lines of steps up to ``last``."""
    kept = [line for line, step in zip(lines, steps) if step is not None and step <= last]
    with storage_errors(path):
        write_atomically(path, b"".join(line + b"\n" for line in kept))


def _step_of(line: bytes) -> int | None:
    """The step of a line; None if the line is damaged, for example cut short by a crash."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return step if type(step) is int else None  # True is an int, too


def _tensorboard(output_dir: Path, **settings: Any) -> Any:
    from pytorch_lightning.loggers import TensorBoardLogger

    return TensorBoardLogger(str(output_dir), name="tensorboard", version="", default_hp_metric=False, **settings)


def _wandb(output_dir: Path, config: TrackingConfig) -> list[Any]:
    if not config.wandb.enabled:
        return []
    from pytorch_lightning.loggers import WandbLogger

    return [
        WandbLogger(
            project=config.wandb.project, entity=config.wandb.entity, group=config.wandb.group, name=config.wandb.name,
            version=_wandb_id(output_dir), save_dir=str(output_dir), offline=config.wandb.offline,
        )
    ]  # fmt: skip


def _wandb_id(output_dir: Path) -> str:
    """The run's id on W&B, the same at every start, so that a resumed run continues there, too."""
    path = output_dir / WANDB_ID_FILE
    if not path.exists():
        with storage_errors(path):
            write_atomically(path, secrets.token_hex(8).encode())
    return path.read_text()
