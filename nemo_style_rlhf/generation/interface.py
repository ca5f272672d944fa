"""The training loop's view of a generator: it streams finished samples and takes new weights.

Nothing here assumes that the generator shares a process, a device or a node with the trainer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nemo_style_rlhf.schema.generation import NO_OVERRIDES, SamplingOverrides


@dataclass(frozen=True, order=True)
class SampleId:
    """Identifies a sample in a run, and orders the samples of a step."""

    step: int
    prompt_id: int
    index: int
    """Number among the samples of this prompt, from 0."""


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
    token_ids: Tensor
    """int64: the response, with its end-of-sequence token if there is one; never empty."""
    logprobs: Tensor
    """[len(token_ids)] float32, nats: the sampler's log-probabilities, under the distribution that it sampled from."""
    finish_reason: str
    """``stop`` (end-of-sequence or a stop string) or ``length`` (truncated)."""
    weights_version: int
    """The version for which the request's stream was opened."""


class TransferError(RuntimeError):
    """New weights did not reach the generator whole. Training on would use samples of another policy."""


@dataclass(frozen=True)
class ProbeTarget:
    """Log-probabilities that a generator with the right weights computes. It travels with the weights; the receiver compares."""

    sequences: tuple[tuple[int, ...], ...]
    """Token ids."""
    logprobs: tuple[Tensor, ...]
    """[length - 1] float32 per sequence, nats: the trainer's log-probabilities of tokens 1.. at temperature 1."""
    max_gap: float

    def check(self, sequence_logprobs: Callable[[Sequence[Sequence[int]]], Sequence[Tensor]]) -> float:
        """Compare with the receiver's log-probabilities.

        Returns:
            The largest difference of a log-probability, in nats.

        Raises:
            TransferError: the difference is larger than ``max_gap``.
        """
        found = sequence_logprobs(self.sequences)
        gaps = [(wanted - own).abs().max() for wanted, own in zip(self.logprobs, found, strict=True)]
        gap = float(torch.stack(gaps).max())  # NaN if one of them is; Python's max may pass over it
        if not gap <= self.max_gap:
            raise TransferError(
                f"after the weight transfer the generator's log-probabilities differ from the trainer's by {gap:.3g} nats on the "
                f"probe (at most {self.max_gap:g} is expected): it does not hold the trainer's weights, or its kernels round "
                "to fewer bits than the trainer's (if you know that, raise audit.max_probe_gap)"
            )
        return gap


class WeightUpdate(Protocol):
    """One version of the weights on its way to a generator."""

    version: int
    probe: ProbeTarget
    digest: str
    """Digest of all tensors, computed by the sender; known once the last bucket has been read."""

    def buckets(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Whole tensors under their Hugging Face names, to be read once. A bucket is invalid once the next one is requested."""


class Stream(Protocol):
    """The requests of one consumer. It sees only its own samples."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, also while others are running."""

    def completed(self) -> Iterator[Completion]:
        """Yield samples as they finish, in no particular order, until none is left."""

    def wait(self) -> list[Completion]:
        """Wait for finished samples, or until :meth:`wake` is called; it may return early, with none."""

    def wake(self) -> None:
        """Make :meth:`wait` return, in any thread that waits, or at its next call."""

    def close(self) -> None:
        """Abort unfinished requests; when this returns, the generator holds none of them."""


class Generator(Protocol):
    def stream(self, version: int) -> Stream:
        """Open a stream of samples from the weights of ``version``.

        Raises:
            TransferError: the generator holds another version.
        """

    def load(self, update: WeightUpdate) -> float:
        """Load new weights, and drop every cache computed with the old ones. A failure leaves the generator unusable.

        Returns:
            The gap that :meth:`ProbeTarget.check` found.

        Raises:
            TransferError: requests are running; a tensor is missing or unknown; or the digest of the received tensors, or the
                log-probabilities computed with them, differ from the sender's.
        """

    def sleep(self) -> dict[str, int]:
        """Free weights and caches; the generator cannot sample before the next :meth:`load`. Without effect while asleep.

        Returns:
            Bytes that other processes of the generator still hold, by name.

        Raises:
            TransferError: requests are running.
        """

    def close(self) -> None: ...
