"""Where rewards come from."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass
class Scores:
    """Of one group of B sequences with N tokens in all."""

    rewards: Tensor
    """[B] float32."""
    values: Tensor
    """[N] float32, action-aligned."""


class Scorer(Protocol):
    def score(self, sequences: Sequence[Tensor]) -> Future[Scores]:
        """Start scoring a group of [L] int64 token sequences; the future carries every error."""
