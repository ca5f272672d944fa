"""A Python reward function from a file, in worker processes that a time limit can kill."""

import multiprocessing
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Future
from concurrent.futures import TimeoutError as LimitReached
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessPool  # type: ignore[import-untyped]

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.reward import FunctionRewardConfig
from nemo_style_rlhf.scoring import worker
from nemo_style_rlhf.scoring.combined import stacked
from nemo_style_rlhf.scoring.contract import arguments, read_answer, requested
from nemo_style_rlhf.scoring.futures import caught, gathered, settle
from nemo_style_rlhf.scoring.interface import RewardError, Scores, ScoringSample


def require_guard() -> None:
    """Check that worker processes may import the main script, as spawned processes do.

    Raises:
        UserError: the script never reads its ``__name__``, so each worker would begin its work again.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)  # none in a notebook
    if script and script.endswith(".py") and "__name__" not in Path(script).read_text(errors="replace"):
        raise UserError(
            f"{script} uses a reward function, whose worker processes import it again and would begin its work again: put that "
            'work below `if __name__ == "__main__":`'
        )


class FunctionScorer:
    def __init__(self, config: FunctionRewardConfig, columns: Collection[str] = ()) -> None:
        """Import the function once in this process, so that mistakes show at the start.

        Args:
            columns: names of the rows' other fields that the function may ask for, the label's column among them.

        Raises:
            UserError: the file or the function in it is missing or cannot be imported, or asks for what no row has; or the main
                script has no guard.
        """
        require_guard()
        assert config.path is not None  # FunctionRewardConfig.validate
        self._config = config
        self._function = (str(Path(config.path).resolve()), config.name)
        self._source = f"the reward function {config.name} of {config.path}"
        function = worker.load_function(*self._function)  # fail now, not in a worker during the first rollout
        self._names = requested(function, columns, self._source)
        self._pool = self._new_pool()

    def score(self, samples: Sequence[ScoringSample]) -> "Future[Scores]":
        if not self._config.per_sample:
            return self._call(samples)
        return gathered([caught(self._call([sample]), RewardError) for sample in samples], stacked)

    def close(self) -> None:
        self._pool.stop()
        for process in tuple(self._pool._pool_manager.worker_manager.workers.values()):
            process.kill()  # join removes semaphores, and a worker that still starts would complain at length about them
        self._pool.join()

    def _new_pool(self) -> ProcessPool:
        """Workers are spawned, not forked: this process has threads, and maybe a CUDA context."""
        return ProcessPool(
            max_workers=self._config.processes,
            initializer=worker.prepare,
            initargs=self._function,
            context=multiprocessing.get_context("spawn"),
        )

    def _call(self, samples: Sequence[ScoringSample]) -> "Future[Scores]":
        """Call the function once; every failure of the call is a :class:`RewardError`."""
        if not self._pool.active:  # a worker was killed between two calls
            self._pool.join()
            self._pool = self._new_pool()
        job = self._pool.schedule(
            worker.call, args=[*self._function, arguments(samples, self._names)], timeout=self._config.timeout_s
        )
        scores: Future[Scores] = Future()
        count = len(samples)  # the callback keeps neither the job nor the samples alive
        job.add_done_callback(lambda done: settle(scores, lambda: self._read(count, done)))
        return scores

    def _read(self, count: int, job: "Future[tuple[Any, str | None]]") -> Scores:
        try:
            answer, raised = job.result()
        except LimitReached as error:
            limit = f"{self._config.timeout_s:g} s"
            raise RewardError(
                f"{self._source} ran longer than {limit} and was killed: raise reward.function.timeout_s or make it faster"
            ) from error
        except ProcessExpired as error:
            raise RewardError(
                f"{self._source} ended its process with exit code {error.exitcode}, by a crash or for lack of memory: correct it"
            ) from error
        except (BrokenExecutor, CancelledError) as error:
            raise RewardError(
                f"{self._source} lost its worker processes ({type(error).__name__}: {error}): find out what ended them"
            ) from error
        if raised is not None:
            raise RewardError(f"{self._source} raised {raised}: correct it")
        return read_answer(answer, count, self._source)
