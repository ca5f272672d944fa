"""A Python reward function from a file, in worker processes that a time limit can kill."""

import asyncio
import functools
import importlib.util
import inspect
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from pebble import ProcessPool  # type: ignore[import-untyped]

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.reward import FunctionRewardConfig
from nemo_style_rlhf.scoring.combined import stacked
from nemo_style_rlhf.scoring.contract import arguments, read_answer
from nemo_style_rlhf.scoring.futures import gathered
from nemo_style_rlhf.scoring.interface import RewardError, Scores, ScoringSample


class FunctionScorer:
    def __init__(self, config: FunctionRewardConfig) -> None:
        """
        Raises:
            UserError: the file or the function in it is missing or cannot be imported.
        """
        assert config.path is not None  # FunctionRewardConfig.validate
        self._config = config
        self._path = str(Path(config.path).resolve())
        self._source = f"the reward function {config.name} of {config.path}"
        load_function(self._path, config.name)  # refuse now, not in a worker during the first rollout
        # Not forked: this process has threads, and maybe a CUDA context.
        self._pool = ProcessPool(max_workers=config.processes, context=multiprocessing.get_context("spawn"))

    def score(self, samples: Sequence[ScoringSample]) -> "Future[Scores]":
        if not self._config.per_sample:
            return self._call(samples)
        return gathered([self._settled(sample) for sample in samples], stacked)

    def close(self) -> None:
        self._pool.stop()
        self._pool.join()

    def _call(self, samples: Sequence[ScoringSample]) -> "Future[Scores]":
        """One call of the function; whatever goes wrong with it is a :class:`RewardError`."""
        job = self._pool.schedule(
            _run, args=[self._path, self._config.name, arguments(samples)], timeout=self._config.timeout_s
        )
        answer: Future[Scores] = Future()
        job.add_done_callback(functools.partial(self._finish, answer, len(samples)))
        return answer

    def _finish(self, answer: "Future[Scores]", count: int, job: "Future[Any]") -> None:
        try:
            answer.set_result(read_answer(job.result(), count, self._source))
        except RewardError as error:
            answer.set_exception(error)
        except TimeoutError:
            limit = f"{self._config.timeout_s:g} s (reward.function.timeout_s)"
            answer.set_exception(RewardError(f"{self._source} ran longer than {limit} and was killed"))
        except Exception as error:  # noqa: BLE001 whatever the user's code raises
            answer.set_exception(RewardError(f"{self._source} raised {type(error).__name__}: {error}"))

    def _settled(self, sample: ScoringSample) -> "Future[Scores | RewardError]":
        """The scores of one sample, or why there are none: another sample's error is not its own."""
        call = self._call([sample])
        settled: Future[Scores | RewardError] = Future()

        def settle(done: "Future[Scores]") -> None:
            error = done.exception()
            settled.set_result(error if isinstance(error, RewardError) else done.result())

        call.add_done_callback(settle)
        return settled


@functools.cache
def load_function(path: str, name: str) -> Any:
    """The function ``name`` of the file ``path``."""
    if not Path(path).is_file():
        raise UserError(f"there is no file {path}: reward.function.path must name the reward function's Python file")
    spec = importlib.util.spec_from_file_location("reward_function", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(function := getattr(module, name, None)):
        raise UserError(f"{path} has no function {name}: set reward.function.name to the one it has")
    return function


def _run(path: str, name: str, given: dict[str, list[Any]]) -> Any:
    """In a worker: call the function and make its answer plain enough to travel."""
    answer = load_function(path, name)(**given)
    if inspect.isawaitable(answer):
        answer = asyncio.run(_awaited(answer))
    return _plain(answer)


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _plain(value: Any) -> Any:
    """Tensors and arrays to lists, so that no shared memory or device crosses the process border."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
