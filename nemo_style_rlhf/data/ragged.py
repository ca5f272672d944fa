"""Ragged batches: sequences laid end to end, and the padded micro-batches for a model.

`flat` tensors have shape [N, ...] with ``N == sum(lengths)``; padding is on the right.
"""

from bisect import bisect_left
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


def micro_batches(
    lengths: Sequence[int], *, token_budget: int, ranks: int = 1, row_multiple: int = 1
) -> list[list[int]]:
    """Split sequences into micro-batches of at most ``token_budget`` padded tokens (rows x longest row).

    The split is a pure function of the arguments: longest first, ties by index, so that sequences in a micro-batch have similar
    lengths and little padding. A sequence longer than the budget has a micro-batch of its own. Several ranks take one micro-batch
    each at a time. For them the budget is lowered as far as that adds no round, so that the last round has work for all ranks and
    the micro-batches of a round take about equally long.

    Args:
        row_multiple: rows of a micro-batch are padded to a multiple of this; fewer would save no time.

    Returns:
        Lists of indices into ``lengths``; each index occurs once.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))

    def cut(budget: int) -> list[list[int]]:
        batches, first = [], 0
        while first < len(order):
            longest = lengths[order[first]]
            rows = max(1, budget // longest)
            if ranks > 1:
                rows = max(rows - rows % row_multiple, min(row_multiple, token_budget // longest), 1)
            batches.append(order[first : first + rows])
            first += rows
        return batches

    if ranks == 1:
        return cut(token_budget)
    most = round_up(len(cut(token_budget)), ranks)
    smallest = bisect_left(range(token_budget), True, key=lambda budget: len(cut(budget)) <= most)
    return cut(smallest)
