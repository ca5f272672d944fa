"""The progress of a run: a bar on a terminal, lines in a log file."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class StepProgress:
    """``PPO 12/40  reward 1.23  KL 0.045  5,120 tokens/s  eta 1:05``."""

    def __init__(self, name: str, total: int, *, enabled: bool = True, period_s: float = 0.0) -> None:
        """Show a bar on a terminal, else lines.

        Args:
            total: steps of the whole run.
            period_s: least seconds between two lines.
        """
        self._name, self._total = name, total
        self._enabled = enabled
        self._period_s = period_s
        self._said_at = time.monotonic()
        self._bar: Progress | None = None
        if enabled and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn(name), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"),
                TimeElapsedColumn(), TextColumn("eta"), TimeRemainingColumn(), console=Console(stderr=True),
            )  # fmt: skip
            self._task = self._bar.add_task(name, total=total, status="")

    def __enter__(self) -> "StepProgress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def show(self, step: int, status: str, *, seconds_per_step: float) -> None:
        """Show that ``step`` is finished."""
        if self._bar:
            self._bar.update(self._task, completed=step, status=status)
        elif self._enabled and time.monotonic() - self._said_at >= self._period_s:
            self._said_at = time.monotonic()
            eta = int(seconds_per_step * (self._total - step))
            line = f"{self._name} {step}/{self._total}  {status}  eta {eta // 60}:{eta % 60:02d}"
            print(line, file=sys.stderr, flush=True)


def ppo_status(*, reward: float, kl: float | None, tokens_per_second: float) -> str:
    """The status of a PPO step; ``kl`` is None without a reference."""
    divergence = "" if kl is None else f"KL {_rounded(kl, 4):.4f}  "
    return f"reward {_rounded(reward, 3):.3f}  {divergence}{tokens_per_second:,.0f} tokens/s"


def _rounded(number: float, digits: int) -> float:
    """Round; a small negative number becomes 0, not -0."""
    return round(number, digits) + 0.0
