"""A pool's samples do not depend on which engine makes them, or on how many are lost. tests/integration has real engines."""

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from nemo_style_rlhf.engines.pool import GROUP, EnginePool
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, ProbeTarget, SampleId
from nemo_style_rlhf.generation.weight_store import PublishedWeights
from nemo_style_rlhf.wire.connection import ServerUnreachable

REQUESTS = [GenerationRequest(SampleId(1, number, 0), (number,), 7 * number, 4) for number in range(2 * GROUP + 5)]
WEIGHTS = PublishedWeights(3, "digest", ProbeTarget((), (), 1.0), (), Path("weights"))


class Engine:
    """Samples tokens that follow from the seed, until it dies."""

    def __init__(self, name: str, calls: int) -> None:
        """``calls``: answers that it gives before it dies."""
        self.name, self.client = name, self
        self._calls = calls

    def call(self, work: Callable[[], Any]) -> Any:
        return work()

    def generate(self, requests: Sequence[GenerationRequest], *, lease: str, version: int) -> list[Completion]:
        if self._calls == 0:
            raise ServerUnreachable(f"{self.name} died")
        self._calls -= 1
        assert lease == "lease"
        return [Completion(each, torch.tensor([each.seed]), torch.zeros(1), "stop", version) for each in requests]


class Fleet:
    """Gives engines in turn, but none that is lost."""

    lease = "lease"

    def __init__(self, *engines: Engine) -> None:
        self.abandoned = threading.Event()
        self.losses: Counter[str] = Counter()
        self._engines, self._lock = deque(engines), threading.Lock()

    def load(self, update: PublishedWeights, shapes: object) -> float:
        return 0.0

    def engine(self) -> Engine:
        with self._lock:
            self._engines.rotate()
            return self._engines[0]

    def lost(self, engine: Engine, reason: object) -> None:
        with self._lock:
            self.losses[engine.name] += 1
            if engine in self._engines:
                self._engines.remove(engine)

    def release(self, engine: Engine) -> None: ...

    def close(self) -> None: ...


def sampled(fleet: Fleet) -> list[tuple[int, int, list[int]]]:
    pool = EnginePool(fleet, weight_shapes={}, calls=2)  # type: ignore[arg-type]
    pool.load(WEIGHTS)
    stream = pool.stream(3)
    stream.submit(REQUESTS)
    found = [
        (each.request.sample.prompt_id, each.weights_version, each.token_ids.tolist()) for each in stream.completed()
    ]
    pool.close()
    return sorted(found)


def test_what_a_lost_engine_was_asked_for_is_asked_of_another() -> None:
    whole = sampled(Fleet(Engine("one", 1000)))
    assert whole == [(number, 3, [7 * number]) for number in range(len(REQUESTS))]
    for calls in range(3):
        fleet = Fleet(Engine("dying", calls), Engine("other", 1000))
        assert sampled(fleet) == whole
        assert set(fleet.losses) <= {"dying"} and (calls or fleet.losses)
