"""Splits the sequences of a request into padded micro-batches on the device, and divides these among ranks. Both depend only on
the lengths and the number of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nemo_style_rlhf.critic_service.protocol import InferRequest
from nemo_style_rlhf.data.ragged import micro_batches, pad, padded_rows
from nemo_style_rlhf.distributed.ranks import shard
from nemo_style_rlhf.wire.messages import Array


@dataclass(frozen=True)
class Share:
    """The part of a request's sequences that one rank computes."""

    rows: list[int]
    """Numbers of the sequences that it needs, in order."""
    steps: list[list[tuple[list[int], bool]]]
    """Its micro-batches of each optimizer step, as places in ``rows``. A flag says whether the micro-batch counts. All ranks have
    the same number of them, see :meth:`Ranks.shard`."""

    @property
    def counted(self) -> list[int]:
        """Places in ``rows`` of the sequences that no other rank answers for."""
        return sorted(place for step in self.steps for places, counts in step if counts for place in places)

    def of(self, request: InferRequest) -> InferRequest:
        """The request with only these sequences."""
        return InferRequest(self.pick(request.tokens, request), request.lengths[self.rows])

    def pick(self, array: Array, request: InferRequest) -> Array:
        """The entries of these sequences in the per-token ``array`` [N] of the request."""
        return _pick(array, request, self.rows)


class Batches:
    def __init__(
        self, *, micro_batch_tokens: int, row_multiple: int, pad_token_id: int | None, device: torch.device, ranks: int = 1
    ) -> None:  # fmt: skip
        """``pad_token_id`` comes from the model's config."""
        self.device = device
        self.pad_token_id = pad_token_id
        self._micro_batch_tokens = micro_batch_tokens
        self._row_multiple = row_multiple
        self._ranks = ranks

    def shares(self, lengths: Array, steps: Sequence[Sequence[int]] | None = None) -> list[Share]:
        """Divide the sequences of ``lengths`` among the ranks.

        Args:
            steps: sequences of each optimizer step; without it, all in one.
        """
        parts = [self._split(lengths, rows) for rows in (steps or [range(len(lengths))])]
        shares = []
        for rank in range(self._ranks):
            own = [list(shard(of_step, rank, self._ranks)) for of_step in parts]
            rows = sorted({row for step in own for batch, _ in step for row in batch})
            places = {row: place for place, row in enumerate(rows)}
            shares.append(Share(rows, [[([places[row] for row in batch], counts) for batch, counts in s] for s in own]))
        return shares

    def _split(self, lengths: Array, rows: Sequence[int]) -> list[list[int]]:
        """The sequences ``rows``, by micro-batch."""
        split = micro_batches(
            [int(lengths[row]) for row in rows], token_budget=self._micro_batch_tokens, ranks=self._ranks,
            row_multiple=self._row_multiple,
        )  # fmt: skip
        return [[rows[index] for index in indices] for indices in split]

    def inputs(self, request: InferRequest, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Token ids and attention mask [rows rounded up, T] of the sequences ``rows``, on the device."""
        lengths = request.lengths[rows].tolist()
        padded = self._padded(lengths)
        flat = torch.from_numpy(_pick(request.tokens, request, rows).astype(np.int64))
        fill = self.pad_token_id if self.pad_token_id is not None else 0
        token_ids = pad(flat, lengths, value=fill, rows=padded)
        # Some attention kernels give NaN for a row without an attended token, so added rows attend to their first token.
        visible = torch.tensor(lengths + [1] * (padded - len(rows)))
        attention_mask = (torch.arange(token_ids.shape[1]) < visible[:, None]).long()
        return token_ids.to(self.device), attention_mask.to(self.device)

    def padded(self, array: Array, request: InferRequest, rows: Sequence[int]) -> Tensor:
        """float32 [rows rounded up, T] from the per-token ``array`` [N]; 0 in padding."""
        lengths = request.lengths[rows].tolist()
        flat = torch.from_numpy(_pick(array, request, rows))
        return pad(flat, lengths, rows=self._padded(lengths)).to(self.device)

    def _padded(self, lengths: Sequence[int]) -> int:
        budget = self._micro_batch_tokens
        return padded_rows(len(lengths), max(lengths), multiple=self._row_multiple, token_budget=budget)


def _pick(array: Array, request: InferRequest, rows: Sequence[int]) -> Array:
    """The entries of the sequences ``rows``, end to end."""
    offsets = request.offsets
    return np.concatenate([array[offsets[row] : offsets[row + 1]] for row in rows])
