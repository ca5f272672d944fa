"""Micro-batches of the supervised stages."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from nemo_style_rlhf.data.ragged import pad
from nemo_style_rlhf.data.sampling import PromptSampler
from nemo_style_rlhf.data.supervised import PreferencePair, SFTExample


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
    """[B, T] int64: 1 at entry t where token t+1 is learned."""
    step_count: int
    """Learned tokens in the whole optimizer step: what its loss is divided by."""


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
    """Pairs in the whole optimizer step."""


def learned_tokens(rows: Sequence[SFTExample]) -> int:
    """How many tokens of ``rows`` are learned; a text's first token has nothing before it to learn from."""
    return sum(len(row) - max(row.prompt_length, 1) for row in rows)


def collate_sft(rows: Sequence[SFTExample], step_rows: Sequence[SFTExample], pad_token_id: int) -> SFTBatch:
    """``rows`` of the optimizer step ``step_rows``."""
    lengths = [len(row) for row in rows]
    positions = torch.arange(max(lengths))
    first = torch.tensor([max(row.prompt_length, 1) - 1 for row in rows])[:, None]
    last = torch.tensor(lengths)[:, None] - 2
    mask = ((positions >= first) & (positions <= last)).long()
    tokens = torch.tensor([token for row in rows for token in row.token_ids])
    return SFTBatch(pad(tokens, lengths, value=pad_token_id), mask, learned_tokens(step_rows))


def collate_pairs(rows: Sequence[PreferencePair], step_rows: Sequence[PreferencePair], pad_token_id: int) -> PairBatch:
    """``rows`` of the optimizer step ``step_rows``."""
    texts = [row.chosen for row in rows] + [row.rejected for row in rows]
    lengths = [len(text) for text in texts]
    tokens = torch.tensor([token for text in texts for token in text])
    margins = torch.tensor([row.margin for row in rows])
    return PairBatch(pad(tokens, lengths, value=pad_token_id), torch.tensor(lengths), margins, len(step_rows))


Collate = Callable[[Sequence[Row], Sequence[Row], int], Batch]


class TrainingBatches(Dataset[Batch]):
    """Item k is micro-batch k of the run: a pure function of rows, seed and k."""

    def __init__(
        self, rows: Sequence[Row], collate: Collate, pad_token_id: int, *, batch_size: int, micro_batch_size: int,
        steps: int, seed: int,
    ) -> None:  # fmt: skip
        self.rows, self.collate, self.pad_token_id = rows, collate, pad_token_id
        self.batch_size, self.micro_batch_size, self.steps = batch_size, micro_batch_size, steps
        self.sampler = PromptSampler(len(rows), seed)

    @property
    def micro_batches_per_step(self) -> int:
        """How many micro-batches make one optimizer step."""
        return self.batch_size // self.micro_batch_size

    def __len__(self) -> int:
        return self.steps * self.micro_batches_per_step

    def __getitem__(self, index: int) -> Batch:
        step, part = divmod(index, self.micro_batches_per_step)
        step_rows = [self.rows[row] for row in self.sampler.take(step * self.batch_size, self.batch_size)]
        alike = sorted(step_rows, key=len, reverse=True)  # neighbours of one length need little padding
        rows = alike[part * self.micro_batch_size : (part + 1) * self.micro_batch_size]
        return self.collate(rows, step_rows, self.pad_token_id)


class ValidationBatches(Dataset[Batch]):
    """Every row once, longest first."""

    def __init__(self, rows: Sequence[Row], collate: Collate, pad_token_id: int, *, batch_size: int) -> None:
        self.rows, self.collate, self.pad_token_id = sorted(rows, key=len, reverse=True), collate, pad_token_id
        self.batch_size = batch_size

    def __len__(self) -> int:
        return math.ceil(len(self.rows) / self.batch_size)

    def __getitem__(self, index: int) -> Batch:
        rows = self.rows[index * self.batch_size : (index + 1) * self.batch_size]
        return self.collate(rows, rows, self.pad_token_id)
