"""Where a step's metrics go: metrics.jsonl always, TensorBoard and W&B through Lightning's loggers if asked for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_style_rlhf.schema.tracking import TrackingConfig

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Appends one JSON object per step; after a resume the lines of steps that are done again are gone."""

    def __init__(self, output_dir: Path, config: TrackingConfig, resolved: dict[str, Any]) -> None:
        """``resolved`` is the run's whole configuration, shown by the loggers as hyper-parameters."""
        output_dir.mkdir(parents=True, exist_ok=True)
        self._path = output_dir / METRICS_FILE
        self._loggers = _loggers(output_dir, config)
        for logger in self._loggers:
            logger.log_hyperparams(resolved)

    def rewind(self, step: int) -> None:
        """Forget everything after ``step``: it will be computed again."""
        if self._path.exists():
            kept = [line for line in self._path.read_text().splitlines() if _step_of(line) <= step]
            beside = self._path.with_suffix(".tmp")
            beside.write_text("".join(line + "\n" for line in kept))
            beside.replace(self._path)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        for logger in self._loggers:
            logger.log_metrics(dict(metrics), step=step)
            logger.save()

    def close(self) -> None:
        for logger in self._loggers:
            logger.finalize("success")


def _step_of(line: str) -> int:
    """The step of a line; one that a crash cut short belongs to no step worth keeping."""
    try:
        return int(json.loads(line)["step"])
    except json.JSONDecodeError:
        return 2**62


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
                name=config.wandb.name,
                save_dir=str(output_dir),
                offline=config.wandb.offline,
            )
        )
    return loggers
