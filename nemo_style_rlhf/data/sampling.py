"""Orders the data as a pure function of seed and position, so that a checkpoint stores one integer."""

import functools

import numpy as np


def mixed_seed(*numbers: int) -> int:
    """A seed for torch, 0 to 2^63 - 1, that depends on all ``numbers``, each at least 0."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1


class PromptSampler:
    """An endless sequence of row indices: epoch after epoch, each row once per epoch."""

    def __init__(self, num_prompts: int, seed: int, shuffle: bool = True) -> None:
        if num_prompts < 1:
            raise ValueError(f"num_prompts={num_prompts}: expected at least 1")
        self.num_prompts = num_prompts
        self.seed = seed
        self.shuffle = shuffle
        # Consecutive calls read from one epoch, or from two at a border.
        self._order = functools.lru_cache(maxsize=2)(self._compute_order)

    def take(self, position: int, count: int) -> list[int]:
        """Indices at ``position .. position + count - 1`` of the sequence; the next call starts at ``position + count``."""
        return [self._at(index) for index in range(position, position + count)]

    def epoch(self, position: int) -> float:
        """Number of passes over the data at ``position``."""
        return position / self.num_prompts

    def _at(self, position: int) -> int:
        epoch, offset = divmod(position, self.num_prompts)
        return int(self._order(epoch)[offset]) if self.shuffle else offset

    def _compute_order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, epoch)).permutation(self.num_prompts)
