"""Ragged batches: sequences laid end to end, and the padded micro-batches for a model.

`flat` tensors have shape [N, ...] with ``N == sum(lengths)``; padding is on the right.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def pad(flat: Tensor, lengths: Sequence[int], *, value: float = 0, rows: int | None = None) -> Tensor:
    """Pad [N] to [B, max(lengths)], or to [rows, max(lengths)] with further rows of padding."""
    return pad_rows(flat.split(list(lengths)), value=value, rows=rows)


def pad_rows(parts: Sequence[Tensor], *, value: float = 0, rows: int | None = None, multiple: int = 1) -> Tensor:
    """Pad ``parts``, [length] each, to [B or rows, T], where T is the longest length rounded up to ``multiple``."""
    padded = pad_sequence(list(parts), batch_first=True, padding_value=value)
    right = round_up(padded.shape[1], multiple) - padded.shape[1]
    below = (rows or len(parts)) - len(parts)
    return torch.nn.functional.pad(padded, (0, right, 0, below), value=value) if right or below else padded


def unpad(padded: Tensor, lengths: Sequence[int]) -> Tensor:
    """Convert [B or more, T] back to [N]: the inverse of :func:`pad`."""
    return torch.cat([row[:length] for row, length in zip(padded, lengths, strict=False)])


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def padded_rows(rows: int, longest: int, *, multiple: int, token_budget: int) -> int:
    """``rows`` rounded up to ``multiple``, as far as a micro-batch of rows x ``longest`` tokens stays within the budget."""
    return max(rows, min(round_up(rows, multiple), token_budget // longest))


def micro_batches(lengths: Sequence[int], *, token_budget: int) -> list[list[int]]:
    """Split sequences into micro-batches of at most ``token_budget`` padded tokens (rows x longest row).

    The split is a pure function of ``lengths``: longest first, ties by index, so that sequences in a micro-batch have similar
    lengths and little padding. A sequence longer than the budget is alone in its micro-batch.

    Returns:
        Lists of indices into ``lengths``; each index occurs once.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    batches: list[list[int]] = []
    for index in order:
        longest = lengths[batches[-1][0]] if batches else 0
        if batches and (len(batches[-1]) + 1) * longest <= token_budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
