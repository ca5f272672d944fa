"""The progress of a supervised stage: a bar on a terminal, a line now and then in a log file."""

import sys
import time
from typing import Any

import pytorch_lightning as pl
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PERIOD_S = 10.0
"""Least seconds between two lines."""


class StageProgress(pl.Callback):
    """``SFT 120/300  loss 2.345  eta 1:05``."""

    def __init__(self, name: str, total: int) -> None:
        self._name, self._total = name, total
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn(name), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"),
                TimeElapsedColumn(), TextColumn("eta"), TimeRemainingColumn(), console=Console(stderr=True),
            )  # fmt: skip
            self._task = self._bar.add_task(name, total=total, status="")

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._first, self._started = trainer.global_step, time.monotonic()
        self._shown, self._said_at = -1, self._started
        if self._bar:
            self._bar.start()

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        step, now = trainer.global_step, time.monotonic()
        if step == self._shown:
            return  # a micro-batch within the step
        self._shown = step
        loss = trainer.callback_metrics.get("train/loss")
        status = "" if loss is None else f"loss {float(loss):.3f}"
        if self._bar:
            self._bar.update(self._task, completed=step, status=status)
        elif now - self._said_at > PERIOD_S:
            self._said_at = now
            eta = int((now - self._started) / (step - self._first) * (self._total - step))
            line = f"{self._name} {step}/{self._total}  {status}  eta {eta // 60}:{eta % 60:02d}"
            print(line, file=sys.stderr, flush=True)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._bar:
            self._bar.stop()
