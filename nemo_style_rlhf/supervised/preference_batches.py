"""Micro-batches of DPO and KTO."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_style_rlhf.data.examples import PreferencePair, SFTExample, UnpairedExample
from nemo_style_rlhf.schema.supervised import FitConfig
from nemo_style_rlhf.supervised.batches import SFTBatch, collate_sft, even_parts, parts_within, split


@dataclass
class DPOBatch:
    """Prompts with their chosen and rejected responses, padded on the right."""

    input_ids: Tensor
    """[2B, T] int64: B chosen, then the B rejected of the same pairs."""
    action_mask: Tensor
    """[2B, T] int64: 1 at entry t where token t+1 belongs to the response."""
    step_count: int
    """Number of pairs in the whole optimizer step."""


def collate_dpo(rows: Sequence[PreferencePair], step_rows: Sequence[PreferencePair], pad_token_id: int) -> DPOBatch:
    """A batch of ``rows``, a part of the optimizer step ``step_rows``."""
    sides = [row.chosen for row in rows] + [row.rejected for row in rows]
    texts = _padded([SFTExample(side, row.prompt_length) for side, row in zip(sides, [*rows, *rows])], pad_token_id)
    return DPOBatch(texts.input_ids, texts.action_mask, len(step_rows))


class MismatchedPairs:
    """Every prompt of ``rows`` with the response to another prompt, from which KTO's KL is estimated.

    Pairs are padded only on demand, because only the first micro-batch of a step needs them. This is not a dataclass:
    Lightning would search all its rows for tensors to move.
    """

    def __init__(self, rows: Sequence[UnpairedExample], pad_token_id: int, fit: FitConfig, max_length: int) -> None:
        self.rows, self.pad_token_id, self.fit, self.max_length = rows, pad_token_id, fit, max_length

    def of(self, rows: Sequence[UnpairedExample]) -> "MismatchedPairs":
        """The mismatched pairs of other rows, with the same settings."""
        return MismatchedPairs(rows, self.pad_token_id, self.fit, self.max_length)

    def micro_batches(self, rank: int = 0, ranks: int = 1) -> Iterator[SFTBatch]:
        """The micro-batches of one rank; with at least ``ranks`` rows, every rank gets the same number."""
        pairs = mismatched(self.rows, self.max_length)
        if not pairs:
            return
        lengths = [len(pair) for pair in pairs]
        parts = math.ceil(len(pairs) / (self.fit.micro_batch_size or self.fit.batch_size))
        if self.fit.micro_batch_tokens:
            parts = parts_within(lengths, self.fit.micro_batch_tokens, packed=False)
        for part in split(lengths, even_parts(parts, len(pairs), ranks), packed=False)[rank::ranks]:
            yield _padded([pairs[row] for row in part], self.pad_token_id)


def mismatched(rows: Sequence[UnpairedExample], max_length: int) -> list[SFTExample]:
    """The prompts of ``rows``, each with the response of another row, cut to ``max_length`` tokens; every response is used once.
    Empty for a single row.

    No prompt gets a response to itself unless more than half of the rows have that prompt: rows are sorted, so that equal
    prompts are together, and each row takes the response half of the list further on, cyclically.
    """
    if len(rows) < 2:
        return []
    ordered = sorted(rows, key=lambda row: row.token_ids[: row.prompt_length])
    half = len(ordered) // 2
    return [
        SFTExample(
            (row.token_ids[: row.prompt_length] + other.token_ids[other.prompt_length :])[:max_length],
            row.prompt_length,
        )
        for row, other in zip(ordered, ordered[half:] + ordered[:half])
    ]


@dataclass
class KTOBatch:
    """Prompts with one judged response each, padded on the right."""

    input_ids: Tensor
    """[B, T] int64."""
    action_mask: Tensor
    """[B, T] int64: 1 at entry t where token t+1 belongs to the response."""
    desirable: Tensor
    """[B] bool."""
    mismatched: MismatchedPairs
    """The mismatched pairs of the whole optimizer step."""
    step_count: int
    """Number of responses in the whole optimizer step."""


def collate_kto(
    rows: Sequence[UnpairedExample], step_rows: Sequence[UnpairedExample], pad_token_id: int, *, fit: FitConfig,
    max_length: int,
) -> KTOBatch:  # fmt: skip
    """A batch of ``rows``, a part of the optimizer step ``step_rows``; ``max_length`` bounds prompt and response together."""
    texts = _padded(rows, pad_token_id)
    others = MismatchedPairs(step_rows, pad_token_id, fit, max_length)
    desirable = torch.tensor([row.desirable for row in rows])
    return KTOBatch(texts.input_ids, texts.action_mask, desirable, others, len(step_rows))


def _padded(texts: Sequence[SFTExample], pad_token_id: int) -> SFTBatch:
    return collate_sft(texts, texts, pad_token_id)
