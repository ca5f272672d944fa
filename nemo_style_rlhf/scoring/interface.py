"""Where rewards come from."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from nemo_style_rlhf.errors import UserError


@dataclass
class ScoringSample:
    """What a source may look at."""

    tokens: Tensor
    """[L] int64, prompt and response, in the policy's tokenizer."""
    prompt: str
    response: str
    """Without special tokens."""
    label: str | None = None


@dataclass
class Scores:
    """Of a group of B samples with N tokens in all."""

    rewards: Tensor
    """[B] float32; NaN where ``failed``."""
    filter_scores: Tensor | None = None
    """[B] float32: what algorithm.filter looks at, where that is not the reward; NaN where ``failed``."""
    values: Tensor | None = None
    """[N] float32, action-aligned: of the critic process."""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """More metrics, [B] each."""
    failed: Tensor | None = None
    """[B] bool: samples a source could not score."""
    reasons: list["RewardError"] = field(default_factory=list)
    """Why they failed, one or more."""

    @property
    def failures(self) -> Tensor:
        return torch.zeros(len(self.rewards), dtype=torch.bool) if self.failed is None else self.failed


class RewardError(UserError):
    """A source failed on samples; the sentence says which source, how, and what to change."""


def require_one_family(reward_model: str, its_tokenizer: str, policy: str, policys_tokenizer: str) -> None:
    """Where the policy's chat template rendered the prompts, only the policy's tokenizer knows its markup.

    Args:
        its_tokenizer, policys_tokenizer: digests.

    Raises:
        UserError: they differ.
    """
    if its_tokenizer != policys_tokenizer:
        raise UserError(
            f"{reward_model} has the tokenizer {its_tokenizer[:16]}, {policy} {policys_tokenizer[:16]}: it would read the "
            "markup of data.format=messages as plain text; take a reward model of the policy's family, or text prompts"
        )


class Scorer(Protocol):
    def score(self, samples: Sequence[ScoringSample]) -> "Future[Scores]":
        """Start scoring a group; the future carries every error."""

    def close(self) -> None:
        """Let go of processes and connections."""
