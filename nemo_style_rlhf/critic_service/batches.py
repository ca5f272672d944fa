"""Splits the sequences of a request into padded micro-batches on the device. The split depends on their lengths only."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nemo_style_rlhf.critic_service.protocol import InferRequest
from nemo_style_rlhf.data.ragged import micro_batches, pad, padded_rows
from nemo_style_rlhf.transport.messages import Array


class Batches:
    def __init__(
        self, *, micro_batch_tokens: int, row_multiple: int, pad_token_id: int | None, device: torch.device
    ) -> None:
        """``pad_token_id`` comes from the model's config."""
        self.device = device
        self.pad_token_id = pad_token_id
        self._micro_batch_tokens = micro_batch_tokens
        self._row_multiple = row_multiple

    def split(self, lengths: Sequence[int]) -> list[list[int]]:
        """Indices of the sequences of each micro-batch."""
        return micro_batches(lengths, token_budget=self._micro_batch_tokens)

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
