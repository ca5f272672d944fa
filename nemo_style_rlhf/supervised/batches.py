"""Micro-batches of the supervised stages."""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch.utils.data import Sampler as PositionSampler

from nemo_style_rlhf.data.examples import PreferencePair, SFTExample
from nemo_style_rlhf.data.ragged import pad, round_up
from nemo_style_rlhf.data.sampling import PromptSampler, Sampler


class Sized(Protocol):
    def __len__(self) -> int: ...


Row = TypeVar("Row", bound=Sized)
Batch = TypeVar("Batch")


@dataclass
class SFTBatch:
    """Texts, padded on the right."""

    input_ids: Tensor
    """[B, T] int64."""
    action_mask: Tensor
    """[B, T] int64: 1 at entry t if token t+1 is a loss token."""
    step_count: int
    """Number of loss tokens in the whole optimizer step, the divisor of its loss."""


@dataclass
class PairBatch:
    """Chosen and rejected texts, padded on the right."""

    input_ids: Tensor
    """[2B, T] int64: B chosen, then the B rejected of the same pairs."""
    lengths: Tensor
    """[2B] int64."""
    margins: Tensor
    """[B] float32."""
    step_count: int
    """Number of pairs in the whole optimizer step."""


def learned_tokens(rows: Sequence[SFTExample]) -> int:
    """Number of loss tokens in ``rows``."""
    return sum(row.num_loss_tokens for row in rows)


def collate_sft(rows: Sequence[SFTExample], step_rows: Sequence[SFTExample], pad_token_id: int) -> SFTBatch:
    """A batch of ``rows``, a part of the optimizer step ``step_rows``."""
    lengths = [len(row) for row in rows]
    tokens = torch.tensor([token for row in rows for token in row.token_ids])
    actions = torch.tensor([learned for row in rows for learned in [*row.learned()[1:], False]]).long()
    return SFTBatch(pad(tokens, lengths, value=pad_token_id), pad(actions, lengths), learned_tokens(step_rows))


def collate_pairs(rows: Sequence[PreferencePair], step_rows: Sequence[PreferencePair], pad_token_id: int) -> PairBatch:
    """A batch of ``rows``, a part of the optimizer step ``step_rows``."""
    texts = [row.chosen for row in rows] + [row.rejected for row in rows]
    lengths = [len(text) for text in texts]
    tokens = torch.tensor([token for text in texts for token in text])
    margins = torch.tensor([row.margin for row in rows])
    return PairBatch(pad(tokens, lengths, value=pad_token_id), torch.tensor(lengths), margins, len(step_rows))


Collate = Callable[[Sequence[Row], Sequence[Row], int], Batch]


class TrainingBatches(Dataset[Batch], Generic[Row, Batch]):
    """Item k is micro-batch k of the run: a pure function of rows, seed and k.

    Every optimizer step has the same number of micro-batches, so that Lightning accumulates over a constant count.
    """

    def __init__(
        self, rows: Sequence[Row], collate: Collate, pad_token_id: int, *, batch_size: int, micro_batches: int,
        steps: int, seed: int, packed: bool = False, sampler: Sampler | None = None,
    ) -> None:  # fmt: skip
        """Divide ``steps`` optimizer steps into micro-batches.

        Args:
            batch_size: number of rows of an optimizer step.
            micro_batches: number of micro-batches of an optimizer step.
            packed: balance micro-batches by tokens; otherwise group rows of similar length.
            sampler: the order of ``rows``; None is a new permutation every epoch.
        """
        self.rows, self.collate, self.pad_token_id = rows, collate, pad_token_id
        self.batch_size, self.micro_batches, self.steps, self.packed = batch_size, micro_batches, steps, packed
        self.sampler = sampler or PromptSampler(len(rows), seed)
        self._parts = lru_cache(maxsize=2)(self._split)

    def __len__(self) -> int:
        return self.steps * self.micro_batches

    def __getitem__(self, index: int) -> Batch:
        step, part = divmod(index, self.micro_batches)
        step_rows = self.step_rows(step)
        return self.collate([step_rows[row] for row in self._parts(step)[part]], step_rows, self.pad_token_id)

    def step_rows(self, step: int) -> list[Row]:
        return [self.rows[row] for row in self.sampler.take(step * self.batch_size, self.batch_size)]

    def _split(self, step: int) -> list[list[int]]:
        return split([len(row) for row in self.step_rows(step)], self.micro_batches, packed=self.packed)


def split(lengths: Sequence[int], parts: int, *, packed: bool) -> list[list[int]]:
    """Split the indices of ``lengths`` into ``parts`` non-empty groups: balanced by tokens, or of similar lengths and sizes."""
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    if not packed:
        edges = [round(part * len(order) / parts) for part in range(parts + 1)]
        return [order[start:end] for start, end in pairwise(edges)]
    groups: list[list[int]] = [[] for _ in range(parts)]
    lightest = [(0, part) for part in range(parts)]  # each row, longest first, goes to the lightest group
    for row in order:
        tokens, part = heapq.heappop(lightest)
        groups[part].append(row)
        heapq.heappush(lightest, (tokens + lengths[row], part))
    return groups


def parts_within(lengths: Sequence[int], token_budget: int, *, packed: bool) -> int:
    """Number of groups into which :func:`split` must divide these rows so that each fits the budget, or is a single row."""

    def fits(parts: int) -> bool:
        groups = [[lengths[row] for row in group] for group in split(lengths, parts, packed=packed)]
        costs = (sum(group) if packed else len(group) * max(group) for group in groups if len(group) > 1)
        return max(costs, default=0) <= token_budget

    parts = max(1, math.ceil(sum(lengths) / token_budget))
    return next((number for number in range(parts, len(lengths)) if fits(number)), len(lengths))


def even_parts(parts: int, rows: int, ranks: int) -> int:
    """``parts`` or a few more, so that every rank gets the same number; with at least ``ranks`` rows, none is empty."""
    return min(round_up(parts, ranks), rows // ranks * ranks)


class Positions(PositionSampler[int]):
    """Every ``stride``-th item of ``total`` from ``rank`` on, except the first ``done`` of them. Its length includes those."""

    def __init__(self, total: int, *, rank: int = 0, stride: int = 1, done: int = 0) -> None:
        self._positions = range(rank, total, stride)
        self._done = done

    def __iter__(self) -> Iterator[int]:
        return iter(self._positions[self._done :])

    def __len__(self) -> int:
        return len(self._positions)


class ValidationBatches(Dataset[Batch], Generic[Row, Batch]):
    """Batches of every row once, longest first; each rank gets the same number of batches."""

    def __init__(
        self, rows: Sequence[Row], collate: Collate, pad_token_id: int, *, batch_size: int, ranks: int = 1
    ) -> None:
        self.rows, self.collate, self.pad_token_id = rows, collate, pad_token_id
        parts = even_parts(math.ceil(len(rows) / batch_size), len(rows), ranks)
        self._parts = split([len(row) for row in rows], parts, packed=False)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> Batch:
        rows = self.rows_of(index)
        return self.collate(rows, rows, self.pad_token_id)

    def rows_of(self, index: int) -> list[Row]:
        return [self.rows[row] for row in self._parts[index]]
