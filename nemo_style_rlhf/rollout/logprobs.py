"""Log-probabilities of a ragged batch, micro-batch by micro-batch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from nemo_style_rlhf.data.ragged import micro_batches, pad_rows, padded_rows
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.models.policy import ActionLogprobs
from nemo_style_rlhf.rollout.types import Rollout
from nemo_style_rlhf.schema.common import EngineConfig, row_multiple


class PolicyForward(Protocol):
    def __call__(
        self,
        input_ids: Tensor,
        action_mask: Tensor,
        with_entropy: bool = False,
        temperature: float | Tensor | None = None,
    ) -> ActionLogprobs: ...


@dataclass
class MicroBatch:
    """Rows of a ragged batch, padded for one forward."""

    positions: Tensor
    """[n] positions of the selected actions in the flat tensors of the batch, row by row."""
    input_ids: Tensor
    """[rows, T] int64 on the device."""
    action_mask: Tensor
    """[rows, T] on the device."""
    temperature: Tensor | None
    """[rows] on the device; None if no prompt has its own."""
    sequences: list[int]
    """Numbers of the sequences in the batch, without the rows of padding."""

    def rows(self, flat: Tensor) -> Tensor:
        """Scatter [n] values of the selected actions into [rows, T] on the device; 0 elsewhere."""
        blank = torch.zeros_like(self.action_mask, dtype=flat.dtype)
        return blank.masked_scatter(self.action_mask.bool(), flat.to(blank.device))

    def emptied(self) -> "MicroBatch":
        """The same forward with no action selected: a loss of 0."""
        return replace(self, positions=self.positions[:0], action_mask=torch.zeros_like(self.action_mask))


def micro_batch_iterator(
    tokens: Tensor, lengths: Sequence[int], mask: Tensor, config: EngineConfig, device: torch.device, ranks: Ranks,
    rows: Sequence[int] | None = None, temperatures: Tensor | None = None,
) -> Iterator[tuple[MicroBatch, bool]]:  # fmt: skip
    """The micro-batches of this rank, as :meth:`Ranks.shard`, of the sequences ``rows`` (default all) of a flat batch.

    The split is a pure function of lengths, row order and number of ranks. The number of rows is padded to a multiple of
    ``config.row_multiple`` if the budget has room, time to a multiple of 8; padding selects no action and so adds nothing to
    any sum.

    Args:
        tokens, mask, temperatures: [N], [N] and [B], see :class:`Experience`.
    """
    rows = range(len(lengths)) if rows is None else rows
    offsets = torch.tensor([0, *lengths]).cumsum(0).tolist()
    token_parts, mask_parts = tokens.split(list(lengths)), mask.split(list(lengths))
    budget, multiple = config.micro_batch_tokens, row_multiple(config.row_multiple, device.type)
    split = micro_batches([lengths[row] for row in rows], token_budget=budget, ranks=ranks.size, row_multiple=multiple)
    for indices, counts in ranks.shard(split):
        chosen = [rows[index] for index in indices]
        padded = padded_rows(len(chosen), lengths[chosen[0]], multiple=multiple, token_budget=budget)
        input_ids = pad_rows([token_parts[row] for row in chosen], rows=padded, multiple=8)
        action_mask = pad_rows([mask_parts[row] for row in chosen], rows=padded, multiple=8)
        positions = torch.cat([mask_parts[row].nonzero().flatten() + offsets[row] for row in chosen])
        temperature = None
        if temperatures is not None:
            temperature = torch.ones(padded)
            temperature[: len(chosen)] = temperatures[chosen]
            temperature = temperature.to(device)
        yield MicroBatch(positions, input_ids.to(device), action_mask.to(device), temperature, chosen), counts


@torch.no_grad()
def batch_logprobs(
    forward: PolicyForward,
    tokens: Tensor,
    lengths: Sequence[int],
    mask: Tensor,
    config: EngineConfig,
    device: torch.device,
    ranks: Ranks,
    temperatures: Tensor | None = None,
) -> Tensor:
    """[N] float32 on the CPU: log-probabilities where ``mask`` is 1, else 0. ``ranks`` share the micro-batches.

    Policy and reference see the same micro-batches, so their KL is exactly 0 while their weights are equal.
    """
    logprobs = torch.zeros(len(tokens))
    for batch, counts in micro_batch_iterator(tokens, lengths, mask, config, device, ranks, temperatures=temperatures):
        result = forward(batch.input_ids, batch.action_mask, temperature=batch.temperature)
        if counts:
            logprobs[batch.positions] = result.logprobs.cpu()
    return ranks.sum(logprobs)


def action_mask(rollouts: Sequence[Rollout]) -> Tensor:
    """[N] float32: 1 at entry t of a sequence if the policy produced token t+1."""
    return action_aligned([rollout.response_mask for rollout in rollouts]).float()


def action_aligned(per_token: Sequence[Tensor]) -> Tensor:
    """Shift the [length] per-token values of each sequence to [N] per-action values: entry t takes the value of token t+1, the
    last entry of a sequence is 0."""
    flat = torch.cat(list(per_token)).roll(-1)
    flat[torch.tensor([len(part) for part in per_token]).cumsum(0) - 1] = 0
    return flat
