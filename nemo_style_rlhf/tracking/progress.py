"""The progress bar of a run."""

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class StepProgress:
    """``PPO 12/40  reward 1.23  KL 0.045  5,120 tokens/s  eta``: a bar on a terminal, a line per step in a log file."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._total = total
        self._enabled = enabled
        self._bar: Progress | None = None
        if enabled and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("PPO"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"),
                TimeElapsedColumn(), TextColumn("eta"), TimeRemainingColumn(), console=Console(stderr=True),
            )  # fmt: skip
            self._task = self._bar.add_task("PPO", total=total, status="")

    def __enter__(self) -> "StepProgress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def show(
        self, step: int, *, reward: float, kl: float | None, tokens_per_second: float, seconds_per_step: float
    ) -> None:
        """``kl`` is None if there is no reference to measure it."""
        divergence = "" if kl is None else f"KL {kl:.4f}  "
        status = f"reward {reward:.3f}  {divergence}{tokens_per_second:,.0f} tokens/s"
        if self._bar:
            self._bar.update(self._task, completed=step, status=status)
        elif self._enabled:
            eta = int(seconds_per_step * (self._total - step))
            print(f"PPO {step}/{self._total}  {status}  eta {eta // 60}:{eta % 60:02d}", file=sys.stderr, flush=True)
