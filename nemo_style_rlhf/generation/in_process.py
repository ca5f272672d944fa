"""Common base of the generators inside a process: streams over one engine, and the loading of new weights."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from torch import Tensor

from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, TransferError, WeightUpdate
from nemo_style_rlhf.generation.transfer import received


class Finished(NamedTuple):
    """A request that the engine has finished."""

    name: str
    token_ids: Tensor
    logprobs: Tensor
    finish_reason: str


class InProcessGenerator:
    """Streams share an engine, driven by their consumers. A subclass knows how to add, step and abort requests."""

    def __init__(self, weight_shapes: dict[str, tuple[int, ...]]) -> None:
        """``weight_shapes`` names the tensors that every update must bring."""
        self._weight_shapes = weight_shapes
        self.steps = 0
        """Engine steps so far."""
        self.cache_share = 0.0
        """Largest share of the KV cache that was in use since the last load."""
        self._version: int | None = 0
        """None while it sleeps."""
        self._numbers = count()
        self._owners: dict[str, InProcessStream] = {}

    def stream(self, version: int) -> "InProcessStream":
        if version != self._version:
            holds = "sleeps" if self._version is None else f"holds {self._version}"
            raise TransferError(f"samples of weights version {version} were asked for, the generator {holds}")
        return InProcessStream(self, version)

    def load(self, update: WeightUpdate) -> float:
        if self._owners:
            raise TransferError(
                f"{len(self._owners)} requests are running: new weights would change in the middle of them"
            )
        slept = self._version is None
        if slept:
            self._wake_weights()
        self._replace_weights(received(update, self._weight_shapes))
        if slept:
            self._wake_cache()  # not before: with the sender's copies of weights there may be no room for it
        self._version, self.cache_share = update.version, 0.0
        return update.probe.check(self.sequence_logprobs)

    def sleep(self) -> dict[str, int]:
        if self._owners:
            raise TransferError(f"{len(self._owners)} requests are running: the generator cannot sleep")
        if self._version is not None:
            self._version = None
            self._sleep()
        return {}

    def expect(self, weight_shapes: dict[str, tuple[int, ...]]) -> None:
        """Set names and shapes of the tensors that every update must bring from now on."""
        self._weight_shapes = weight_shapes

    @property
    def running(self) -> int:
        """Requests that are waiting or computed."""
        return len(self._owners)

    def add(self, stream: "InProcessStream", request: GenerationRequest) -> str:
        """Queue a request for ``stream``, and return its name."""
        sample = request.sample
        name = f"{next(self._numbers)}/{sample.step}/{sample.prompt_id}/{sample.index}"
        if not self._owners:
            self._before_first()
        self._add(name, request)  # it may refuse the request
        self._owners[name] = stream
        return name

    def step(self) -> None:
        """Run one engine step, and hand finished requests to their streams."""
        ended = self._step()
        self.steps += 1
        self.cache_share = max(self.cache_share, self._cache_in_use())
        for finished in ended:
            self._owners.pop(finished.name).take(finished)

    def abort(self, names: Sequence[str]) -> None:
        self._abort(names)
        for name in names:
            del self._owners[name]

    def preempt(self) -> None:
        """Take the cache from all running requests, as when it is full: their tokens so far are then read again."""

    # --- for subclasses -----------------------------------------------------------------------------------------------

    def _before_first(self) -> None:
        """Called before a request is added to an idle engine."""

    def _add(self, name: str, request: GenerationRequest) -> None:
        raise NotImplementedError

    def _step(self) -> list[Finished]:
        raise NotImplementedError

    def _abort(self, names: Sequence[str]) -> None:
        raise NotImplementedError

    def _cache_in_use(self) -> float:
        """Share of the KV cache that running requests use; 0 if there is no cache of fixed size."""
        return 0.0

    def _replace_weights(self, buckets: Iterator[list[tuple[str, Tensor]]]) -> None:
        raise NotImplementedError

    def _sleep(self) -> None:
        """Free the memory of weights and cache."""

    def _wake_weights(self) -> None:
        """Take memory for weights; their content follows later."""

    def _wake_cache(self) -> None:
        """Take memory for the cache."""

    def sequence_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Log-probabilities [length - 1] float32, nats, of tokens 1.. of each sequence at temperature 1."""
        raise NotImplementedError


@dataclass
class InProcessStream:
    _generator: InProcessGenerator
    _version: int
    _running: dict[str, GenerationRequest] = field(default_factory=dict)
    _done: list[Completion] = field(default_factory=list)
    _woken: threading.Event = field(default_factory=threading.Event)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            self._running[self._generator.add(self, request)] = request

    def completed(self) -> Iterator[Completion]:
        while self.unfinished or self._done:
            if not self._done:
                self._generator.step()
            yield from self.finished()

    def wait(self) -> list[Completion]:
        """Run an engine step; without requests, wait until :meth:`wake` is called."""
        if self.unfinished:
            self._generator.step()
        elif not self._done:
            self._woken.wait()
        self._woken.clear()
        return self.finished()

    def wake(self) -> None:
        self._woken.set()

    @property
    def unfinished(self) -> bool:
        """True if requests are running."""
        return bool(self._running)

    def finished(self) -> list[Completion]:
        """The samples that have finished since the last call."""
        done, self._done = self._done, []
        return done

    def take(self, finished: Finished) -> None:
        request = self._running.pop(finished.name)
        self._done.append(Completion(request, *finished[1:], weights_version=self._version))

    def close(self) -> None:
        self._generator.abort(list(self._running))
        self._running.clear()
