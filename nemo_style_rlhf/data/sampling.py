"""Orders the data as a pure function of seed and position, so that a checkpoint stores one integer."""

import functools
from collections.abc import Sequence

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


class MixtureSampler:
    """An endless sequence of row indices over several sources, each with a share of every stretch of it.

    Blocks of ``BLOCK`` positions hold the sources in their shares, to a row, in a seeded order; each source has its own epochs.
    """

    BLOCK = 64

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool = True) -> None:
        """Mix the rows of several sources.

        Args:
            sizes: number of rows of each source; the rows of all sources follow each other.
            weights: one for each source, above 0; its share is its weight, divided by the sum of all.
        """
        self._sources = [PromptSampler(size, mixed_seed(seed, number), shuffle) for number, size in enumerate(sizes)]
        self._starts = np.cumsum([0, *sizes])
        self._shares = np.array(weights, dtype=np.float64) / sum(weights)
        self.seed, self.shuffle = seed, shuffle
        self._taken = [np.zeros(len(sizes), dtype=np.int64)]  # rows taken from each source before each block
        self._block = functools.lru_cache(maxsize=2)(self._compute_block)

    def take(self, position: int, count: int) -> list[int]:
        """As :meth:`PromptSampler.take`."""
        return [self._at(index) for index in range(position, position + count)]

    def epoch(self, position: int) -> float:
        """Number of rows taken at ``position``, per row of all sources."""
        return position / int(self._starts[-1])

    def _at(self, position: int) -> int:
        block, offset = divmod(position, self.BLOCK)
        for known in range(len(self._taken) - 1, block):
            self._taken.append(self._taken[known] + np.bincount(self._sources_of(known), minlength=len(self._sources)))
        source, row = self._block(block)[offset]
        return int(self._starts[source]) + self._sources[source].take(row, 1)[0]

    def _sources_of(self, block: int) -> list[int]:
        """The source of each position: always the one that lags most behind its share."""
        taken, sources = self._taken[block].copy(), []
        for position in range(block * self.BLOCK, (block + 1) * self.BLOCK):
            sources.append(int(np.argmax(self._shares * (position + 1) - taken)))
            taken[sources[-1]] += 1
        return sources

    def _compute_block(self, block: int) -> list[tuple[int, int]]:
        """Source, and position in its own sequence, for each position of the block."""
        sources = np.array(self._sources_of(block))
        if self.shuffle:
            sources = np.random.default_rng((self.seed, block)).permutation(sources)
        taken, places = self._taken[block].copy(), []
        for source in sources.tolist():
            places.append((source, int(taken[source])))
            taken[source] += 1
        return places


Sampler = PromptSampler | MixtureSampler
