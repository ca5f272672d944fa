"""The training rows of an episode. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SampledSpan:
    """A span of a row that the policy sampled and this row trains."""

    start: int
    """Position of its first token in the row."""
    end: int
    """Position after its last token."""
    finish_reason: str
    """``stop`` or ``length``."""
    reward: float = 0.0
    """Reward from the environment."""


@dataclass(frozen=True)
class Row:
    """A branch of an episode, from the first token of its first prompt to the last token of its last answer; L tokens."""

    tokens: tuple[int, ...]
    """[L] token ids."""
    mask: tuple[bool, ...]
    """[L]: True on sampled tokens that this row trains. Sampled tokens that an earlier row trains are False."""
    logprobs: tuple[float, ...]
    """[L] nats: log-probability of each token under ``mask`` when it was sampled; 0 elsewhere."""
    versions: tuple[int, ...]
    """[L]: version of the weights that sampled each token under ``mask``; -1 elsewhere."""
    turns: tuple[SampledSpan, ...]
    """The spans under ``mask``, in order."""
