"""A generator whose samples come from engines. A sample does not depend on the engine that makes it, or on the time."""

import queue
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Literal

from nemo_style_rlhf.engines.fleet import LOST, CallAbandoned, Fleet
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, TransferError, WeightUpdate
from nemo_style_rlhf.generation.weight_store import PublishedWeights

GROUP = 32
"""Requests of one call: the size of a scoring group, since scoring waits for all samples of a group anyway."""


class EnginePool:
    """Loads published weights into engines, and asks them for samples."""

    def __init__(self, fleet: Fleet, *, weight_shapes: dict[str, tuple[int, ...]], calls: int) -> None:
        """Sample from the engines of ``fleet``.

        Args:
            fleet: started.
            weight_shapes: the tensors of every version.
            calls: number of calls that may be under way.
        """
        self._fleet, self._shapes = fleet, weight_shapes
        self._version = -1
        self._tokens, self._counting = 0, threading.Lock()
        self._looked = 0, time.monotonic()
        """``_tokens`` when metrics were last asked for, and the time."""
        self._calls = ThreadPoolExecutor(calls, "engines")
        self._streams: weakref.WeakSet[PoolStream] = weakref.WeakSet()

    def stream(self, version: int) -> "PoolStream":
        if version != self._version:
            raise TransferError(
                f"samples of weights version {version} were asked for, the engines hold {self._version}"
            )
        stream = PoolStream(self, version)
        self._streams.add(stream)
        if self._fleet.abandoned.is_set():
            raise CallAbandoned
        return stream

    def load(self, update: WeightUpdate) -> float:
        """Make every engine load a published version; one that starts later loads it, too, as long as it is stored."""
        assert isinstance(update, PublishedWeights)
        gap = self._fleet.load(update, self._shapes)
        self._version = update.version
        return gap

    def sleep(self) -> dict[str, int]:
        self._version = -1
        return self._fleet.sleep()

    @property
    def metrics(self) -> dict[str, float]:
        """The fleet's metrics, and `engines/tokens_per_second`, sampled since the last call, idle seconds included."""
        sampled, now = self._tokens, time.monotonic()
        speed = (sampled - self._looked[0]) / (now - self._looked[1])
        self._looked = sampled, now
        return self._fleet.metrics | {"engines/tokens_per_second": speed}

    def abandon(self) -> None:
        """Make every thread that waits here raise :class:`CallAbandoned`, until :meth:`resume`."""
        self._fleet.abandoned.set()
        for stream in list(self._streams):
            stream.close()

    def resume(self) -> None:
        self._fleet.abandoned.clear()

    def ask(self, requests: Sequence[GenerationRequest], version: int) -> "Future[list[Completion]]":
        """Ask an engine to sample ``requests``, and another one if the first is lost."""
        return self._calls.submit(self._ask, requests, version)

    def _ask(self, requests: Sequence[GenerationRequest], version: int) -> list[Completion]:
        while True:
            engine = self._fleet.engine()
            try:
                samples = engine.call(
                    partial(engine.client.generate, requests, lease=self._fleet.lease, version=version)
                )
                with self._counting:
                    self._tokens += sum(len(each.token_ids) for each in samples)
                return samples
            except LOST as error:
                self._fleet.lost(engine, error)
            finally:
                self._fleet.release(engine)

    def close(self) -> None:
        self._calls.shutdown(wait=False, cancel_futures=True)
        self._fleet.close()


class PoolStream:
    """Requests in groups of ``GROUP``, each asked for in one call."""

    def __init__(self, pool: EnginePool, version: int) -> None:
        self._pool, self._version = pool, version
        self._calls: set[Future[list[Completion]]] = set()
        self._done: queue.SimpleQueue[Future[list[Completion]] | Literal["closed", "woken"]] = queue.SimpleQueue()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for start in range(0, len(requests), GROUP):
            call = self._pool.ask(requests[start : start + GROUP], self._version)
            self._calls.add(call)
            call.add_done_callback(self._done.put)

    def completed(self) -> Iterator[Completion]:
        """Yield all completions as they finish.

        Raises:
            CallAbandoned: the stream was closed meanwhile.
        """
        while self._calls:
            yield from self.wait()

    def wait(self) -> list[Completion]:
        """The completions of the next finished call; empty after :meth:`wake`.

        Raises:
            CallAbandoned: the stream was closed meanwhile.
        """
        call = self._done.get()
        if call == "closed":
            raise CallAbandoned
        if call == "woken":
            return []
        self._calls.remove(call)
        return call.result()

    def wake(self) -> None:
        self._done.put("woken")

    def close(self) -> None:
        """Forget unfinished calls. The engines drop them with the next weights: these have another lease."""
        for call in list(self._calls):
            call.cancel()
        self._done.put("closed")
