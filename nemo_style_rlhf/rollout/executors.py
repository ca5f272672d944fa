"""The two executors of the batch queue. Both do one task after the other, in the order in which they were submitted."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Any, TypeVar

from nemo_style_rlhf.rollout.producer import Timers
from nemo_style_rlhf.rollout.types import Batch
from nemo_style_rlhf.scoring.futures import InlineExecutor

Result = TypeVar("Result")


class InlineRollouts(InlineExecutor):
    """The trainer's thread does a task when it needs the result, and the trainer's timers are charged."""

    seconds: Mapping[str, float] = {}

    def sample(self, make: Callable[[Timers], Batch], timers: Timers, *, prefetched: bool) -> Batch:
        """``make(timers)``. If the batch is ``prefetched``, it also waits for the scores, which a checkpoint must hold."""
        batch = make(timers)
        if prefetched:
            batch.scores.result()
            timers.lap("wait_for_scores")
        return batch


class ThreadedRollouts(ThreadPoolExecutor):
    """A thread of its own works alongside training and measures its own time; the trainer's timers show how long it waits."""

    def __init__(self) -> None:
        super().__init__(1, "rollouts")
        self.seconds: Mapping[str, float] = {}
        """Seconds that the last batch took (``sampling``), and the thread waited for work since the one before (``idle``)."""
        self._last_end, self._idle = perf_counter(), 0.0

    def submit(self, task: Callable[..., Result], /, *args: Any, **kwargs: Any) -> "Future[Result]":
        def timed() -> Result:
            self._idle += perf_counter() - self._last_end
            try:
                return task(*args, **kwargs)
            finally:
                self._last_end = perf_counter()

        return super().submit(timed)

    def sample(self, make: Callable[[Timers], Batch], timers: Timers, *, prefetched: bool) -> Batch:
        """``make`` with timers of its own. Scores arrive while the thread makes the next batch."""
        began = perf_counter()
        batch = make(Timers())
        self.seconds = {"sampling": perf_counter() - began, "idle": self._idle}
        self._idle = 0.0
        return batch
