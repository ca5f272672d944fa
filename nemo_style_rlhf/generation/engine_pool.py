"""A generator whose samples come from engines. Which engine makes a sample, and when, changes nothing about it."""

import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from nemo_style_rlhf.checkpoint.files import storage_errors
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.generation.engine_fleet import LOST, Fleet
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, TransferError, WeightUpdate
from nemo_style_rlhf.generation.weight_store import WeightStore

GROUP = 32
"""Requests of one call: the size of a scoring group, which waits for all of its samples anyway."""


class EnginePool:
    """Publishes the weights and asks the engines. Every rank makes the same calls; only the first talks to the engines."""

    def __init__(
        self, fleet: Fleet, store: Path, *, weight_shapes: dict[str, tuple[int, ...]], calls: int, ranks: Ranks
    ) -> None:
        """
        Args:
            fleet: started on the first rank.
            store: folder for published weights.
            weight_shapes: the tensors of every version.
            calls: number of calls that may be under way.
        """
        self._fleet, self.ranks, self._shapes = fleet, ranks, weight_shapes
        self._store = WeightStore(store) if ranks.is_first else None
        self._version = -1
        self._calls = ThreadPoolExecutor(calls, "engines")

    def stream(self, version: int) -> "PoolStream":
        if version != self._version:
            raise TransferError(
                f"samples of weights version {version} were asked for, the engines hold {self._version}"
            )
        return PoolStream(self, version)

    def load(self, update: WeightUpdate) -> float:
        folder = self.ranks.everyone(lambda: self._publish(update))[0]
        gap = self.ranks.on_first(lambda: self._fleet.load(folder, self._shapes))
        self._version = update.version
        return gap

    def _publish(self, update: WeightUpdate) -> Path:
        if self._store is not None:
            with storage_errors(f"weights version {update.version} in {self._store.root}"):
                self._store.keep([])
                return self._store.publish(update)
        for _ in update.buckets():  # the ranks gather the weights together
            pass
        return Path()

    def ask(self, requests: Sequence[GenerationRequest], version: int) -> "Future[list[Completion]]":
        """Have an engine sample ``requests``, and another one if the first is lost."""
        return self._calls.submit(self._ask, requests, version)

    def _ask(self, requests: Sequence[GenerationRequest], version: int) -> list[Completion]:
        while True:
            engine = self._fleet.engine()
            try:
                samples = engine.client.generate(requests, lease=self._fleet.lease, version=version)
                self._fleet.release(engine)
                return samples
            except LOST as error:
                self._fleet.lost(engine, error)

    def close(self) -> None:
        self._calls.shutdown(wait=False, cancel_futures=True)
        self._fleet.close()
        if self._store is not None:
            self._store.close()


class PoolStream:
    """Requests in groups of ``GROUP``, each asked for in one call."""

    def __init__(self, pool: EnginePool, version: int) -> None:
        self._pool, self._version = pool, version
        self._calls: set[Future[list[Completion]]] = set()
        self._done: queue.SimpleQueue[Future[list[Completion]]] = queue.SimpleQueue()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for start in range(0, len(requests) if self._pool.ranks.is_first else 0, GROUP):
            call = self._pool.ask(requests[start : start + GROUP], self._version)
            self._calls.add(call)
            call.add_done_callback(self._done.put)

    def completed(self) -> Iterator[Completion]:
        while self._calls:
            call = self._done.get()
            self._calls.remove(call)
            yield from call.result()

    def close(self) -> None:
        """Forget unfinished calls. The engines drop them with the next weights, whose lease is another."""
        for call in self._calls:
            call.cancel()
        self._calls.clear()
