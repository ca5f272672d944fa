"""Packing: sequences lie end to end instead of being padded, and attention stays within each sequence.

No padding is computed. On CUDA in half precision, attention is torch's variable-length kernel. Elsewhere it is one causal
attention per sequence, exact and without waste either.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as random_zeros
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from nemo_style_rlhf.errors import UserError

PACKED_ATTENTION = "packed"
"""Name of the attention implementation; a model loaded with it is packed."""


@dataclass
class Packed:
    """The wanted prefixes of padded rows, end to end."""

    kept: Tensor
    """[B, T] bool: the entries that are packed."""
    inputs: dict[str, Any]
    """Arguments for a Hugging Face model, whose outputs are [1, N, ...] with N = kept.sum()."""

    def select(self, mask: Tensor) -> Tensor:
        """Convert a mask [B, T] bool to [N] bool, the same entries in the packed row."""
        return mask[self.kept]

    def scatter(self, values: Tensor) -> Tensor:
        """Scatter [N] values to [B, T]; 0 where nothing was computed."""
        return values.new_zeros(self.kept.shape).masked_scatter(self.kept, values)


def is_packed(hf: PreTrainedModel) -> bool:
    return bool(hf.config._attn_implementation == PACKED_ATTENTION)


def pack(input_ids: Tensor, wanted: Tensor) -> Packed:
    """Pack rows of ``input_ids`` [B, T], each up to its last entry in ``wanted`` [B, T]; rows without such an entry are left out.

    If ``wanted`` is empty, one token is packed: attention needs at least one.
    """
    kept = wanted.bool().flip(1).cumsum(1).flip(1) > 0
    if not kept.any():
        kept[0, 0] = True
    lengths = kept.sum(1)
    lengths = lengths[lengths > 0]
    boundaries = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    inputs = {
        "input_ids": input_ids[kept][None],
        "position_ids": positions[kept][None],
        "cu_seq_lens_q": boundaries,
        "max_length_q": int(lengths.max()),
        "use_cache": False,
    }
    return Packed(kept, inputs)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [B, heads, T, D] to [B, T, heads, D].

    Without boundaries this is causal attention within each row.

    Args:
        cu_seq_lens_q: [sequences + 1] int32, boundaries of the sequences in the packed row.
        max_length_q: tokens of the longest sequence.
    """
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"packed attention is for training, not for decoding: {query.shape[2]} queries, {key.shape[2]} keys"
        )
    if query.is_cuda:
        query, key, value = _autocast(query, key, value)
    p = dropout if module.training else 0.0
    if cu_seq_lens_q is None:
        return _causal(query, key, value, scaling, p, sliding_window).transpose(1, 2), None
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and p == 0 and max_length_q is not None:
        return _variable_length(query, key, value, scaling, sliding_window, cu_seq_lens_q, max_length_q)[None], None
    lengths = cu_seq_lens_q.diff().tolist()
    parts = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    return torch.cat([_causal(q, k, v, scaling, p, sliding_window) for q, k, v in parts], dim=2).transpose(1, 2), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


@contextmanager
def packing_by_name(path: str) -> Iterator[None]:
    """Build a model of ``path`` within this context.

    Raises:
        UserError: its code looks :data:`PACKED_ATTENTION` up among attention classes of its own, as Falcon's does.
    """
    try:
        yield
    except KeyError as error:
        if error.args != (PACKED_ATTENTION,):
            raise
        raise UserError(
            f"the code of {path} has attention classes of its own, without packing: set model.packing=false"
        ) from error


@torch.no_grad()
def require_packing(hf: PreTrainedModel) -> None:
    """Raise UserError if packed sequences would see each other in this model, or its attention is not standard."""
    config = hf.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise UserError(
            f"{type(hf).__name__} caps its attention logits, which packing does not: set model.packing=false"
        )
    if getattr(config, "attention_chunk_size", None):
        raise UserError(f"{type(hf).__name__} attends in chunks, which packing does not: set model.packing=false")
    if not hf._supports_attention_backend:
        raise UserError(f"{type(hf).__name__} has an attention of its own, without packing: set model.packing=false")
    rows = torch.arange(12, device=hf.device).view(2, 6) % hf.config.get_text_config().vocab_size
    was_training = hf.training
    hf.eval()
    packed = hf.base_model(**pack(rows, torch.ones_like(rows)).inputs).last_hidden_state[0]
    attention = hf.config._attn_implementation
    hf.set_attn_implementation("eager")  # transformers' own, with all that packing might leave out, such as sinks
    alone = torch.cat([hf.base_model(input_ids=row[None], use_cache=False).last_hidden_state[0] for row in rows])
    hf.set_attn_implementation(attention)
    hf.train(was_training)
    precision = 1e-4 if hf.dtype in (torch.float32, torch.float64) else 3e-2
    if not torch.allclose(packed, alone, rtol=0, atol=precision * float(alone.abs().max())):
        raise UserError(
            f"{type(hf).__name__} has an attention of its own, which packing would change: set model.packing=false"
        )


def _autocast(*tensors: Tensor) -> Iterator[Tensor]:
    """Cast the inputs of attention as torch's own does under autocast: RoPE gives fp32 queries and keys with bf16 values."""
    for x in tensors:
        casts = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
        yield x.to(torch.get_autocast_dtype(x.device.type)) if casts else x


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, p: float, window: int | None) -> Tensor:
    """Attention [B, heads, T, D]: each position sees itself and earlier ones, only the last ``window`` positions if given."""
    length = query.shape[2]
    key, value = (_as_many_heads(x, query) for x in (key, value))
    mask = None
    if window is not None and length > window:
        distance = torch.arange(length, device=query.device)[:, None] - torch.arange(length, device=query.device)
        mask = (distance >= 0) & (distance < window)
    if query.is_cuda:
        return scaled_dot_product_attention(query, key, value, mask, p, is_causal=mask is None, scale=scaling)
    # On CPU the backward pass of the fused kernel is slower than these four operations.
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    weights = logits.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.promote_types(query.dtype, torch.float32))
    return random_zeros(weights.to(query.dtype), p) @ value


def _variable_length(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    boundaries: Tensor,
    longest: int,
) -> Tensor:
    """Attention over packed sequences, [1, heads, N, D] to [N, heads, D]."""
    from torch.nn.attention.varlen import varlen_attn

    heads = (_as_many_heads(x, query)[0].transpose(0, 1) for x in (query, key, value))
    left = -1 if window is None else window - 1
    return varlen_attn(*heads, boundaries, boundaries, longest, longest, scale=scaling, window_size=(left, 0))


def _as_many_heads(x: Tensor, query: Tensor) -> Tensor:
    """Grouped keys or values [B, groups, T, D], repeated for every head of ``query``."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], 1) if x.shape[1] != query.shape[1] else x
