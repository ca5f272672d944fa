"""What the training loop knows about a generator: a stream of finished samples, and a door for new weights.

Nothing here presumes that the generator shares a process, a device or a node with the trainer.
"""

import hashlib
from collections.abc import Iterator, Sequence
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


class WeightTransport(Protocol):
    """Carries the trainer's weights to the generator: ``begin``, any number of ``send``, ``finish``."""

    def begin(self, version: int) -> None:
        """Announce the weights that will be ``version``; nothing is generated until ``finish``."""

    def send(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Hand over whole tensors under their Hugging Face names; they may be reused after the call."""

    def finish(self, digest: str) -> None:
        """Put the weights to use and drop every cache computed with the old ones.

        A transfer that fails, here or in ``send``, leaves the generator unusable.

        Raises:
            TransferError: a tensor is missing or unknown, or what arrived is not what ``digest`` says was sent.
        """


class TransferError(RuntimeError):
    """New weights did not reach the generator whole: going on would train on samples of another policy."""


class Generator(Protocol):
    weights_version: int

    @property
    def transport(self) -> WeightTransport: ...

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; may be called while others are running."""

    def completed(self) -> Iterator[Completion]:
        """Yield samples as they finish, in no particular order, until none is left."""

    def pause(self) -> None:
        """Stop decoding; what is queued stays queued."""

    def resume(self) -> None: ...

    def sequence_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Log-probabilities [len - 1] float32 of tokens 1.. of given sequences at temperature 1: the probe of a transfer."""

    def close(self) -> None: ...
