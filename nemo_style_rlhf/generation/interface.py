"""What the training loop knows about a generator: streams of finished samples, and new weights.

Nothing here presumes that the generator shares a process, a device or a node with the trainer.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from nemo_style_rlhf.schema.generation import NO_OVERRIDES, SamplingOverrides


@dataclass(frozen=True, order=True)
class SampleId:
    """Identifies a sample in a run; orders samples within a step."""

    step: int
    prompt_id: int
    index: int
    """Which of the samples of this prompt, from 0."""


def sample_seed(run_seed: int, sample: SampleId) -> int:
    """A 31-bit seed, a pure function of the run's seed and the sample's identity: not of engines, ranks or order."""
    key = f"{run_seed}/{sample.step}/{sample.prompt_id}/{sample.index}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:4], "big") >> 1


@dataclass(frozen=True)
class GenerationRequest:
    sample: SampleId
    prompt: tuple[int, ...]
    """Token ids."""
    seed: int
    max_tokens: int
    sampling: SamplingOverrides = NO_OVERRIDES


@dataclass
class Completion:
    """One finished sample."""

    request: GenerationRequest
    token_ids: list[int]
    """The response, with its end-of-sequence token if it produced one; never empty."""
    logprobs: Tensor
    """[len(token_ids)] float32: of the sampler, under the distribution it sampled from."""
    finish_reason: str
    """``stop`` (end-of-sequence or a stop string) or ``length`` (truncated)."""
    weights_version: int
    """The version that the request's stream was opened for."""


class TransferError(RuntimeError):
    """New weights did not reach the generator whole: going on would train on samples of another policy."""


@dataclass(frozen=True)
class ProbeTarget:
    """What a generator that holds the right weights computes: it travels with them, and the receiver compares."""

    sequences: tuple[tuple[int, ...], ...]
    """Token ids."""
    logprobs: tuple[Tensor, ...]
    """[length - 1] float32 per sequence, nats: of tokens 1.. at temperature 1, by the trainer."""
    max_gap: float

    def check(self, sequence_logprobs: Callable[[Sequence[Sequence[int]]], Sequence[Tensor]]) -> float:
        """Compare with what the receiver computes.

        Returns:
            The largest difference of a log-probability, in nats.

        Raises:
            TransferError: it is larger than ``max_gap``.
        """
        found = sequence_logprobs(self.sequences)
        gap = max(float((wanted - own).abs().max()) for wanted, own in zip(self.logprobs, found, strict=True))
        if not gap <= self.max_gap:
            raise TransferError(
                f"after the weight transfer the generator's log-probabilities differ from the trainer's by {gap:.3g} nats on the "
                f"probe (at most {self.max_gap:g} is expected): it does not hold the trainer's weights"
            )
        return gap


class WeightUpdate(Protocol):
    """One version of the weights on its way to a generator."""

    version: int
    probe: ProbeTarget
    digest: str
    """Digest of all tensors, taken where they come from; known once the last bucket has been read."""

    def buckets(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Whole tensors under their Hugging Face names, to be read once. A bucket is reused after the next one was asked for."""


class Stream(Protocol):
    """The requests of one consumer, which sees its own samples only."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; may be called while others are running."""

    def completed(self) -> Iterator[Completion]:
        """Yield samples as they finish, in no particular order, until none is left."""

    def close(self) -> None:
        """Abandon what is unfinished; the generator has none of it left when this returns."""


class Generator(Protocol):
    def stream(self, version: int) -> Stream:
        """A stream of samples of the weights ``version``.

        Raises:
            TransferError: the generator holds another version.
        """

    def load(self, update: WeightUpdate) -> float:
        """Put new weights to use, and drop every cache computed with the old ones. One that fails leaves the generator unusable.

        Returns:
            The gap that :meth:`ProbeTarget.check` found.

        Raises:
            TransferError: requests are running; a tensor is missing or unknown; the digest of those that arrived, or what the
                generator computes with them, is not what the sender says.
        """

    def close(self) -> None: ...
