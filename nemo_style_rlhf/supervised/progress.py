"""The progress of a supervised stage."""

import time
from typing import Any

import pytorch_lightning as pl

from nemo_style_rlhf.tracking.progress import StepProgress

PERIOD_S = 10.0
"""Least seconds between two lines in a log file."""


class StageProgress(pl.Callback):
    """``SFT 120/300  loss 2.345  eta 1:05``."""

    def __init__(self, name: str, total: int) -> None:
        self._progress = StepProgress(name, total, period_s=PERIOD_S)

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._first = self._shown = trainer.global_step
        self._started = time.monotonic()
        self._progress.__enter__()

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if step == self._shown:
            return  # a micro-batch within the step
        self._shown = step
        loss = trainer.callback_metrics.get("train/loss")
        status = "" if loss is None else f"loss {float(loss):.3f}"
        seconds = (time.monotonic() - self._started) / (step - self._first)
        self._progress.show(step, status, seconds_per_step=seconds)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._progress.__exit__(None, None, None)

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        self._progress.__exit__(None, None, None)
