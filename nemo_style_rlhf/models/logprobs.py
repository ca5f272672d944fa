"""Log-probabilities and entropies of given tokens without the [batch, time, vocabulary] logits in memory."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nemo_style_rlhf.models.cpu_linear import matmul_dtype

CHUNK_ELEMENTS = 2**25  # logits of one chunk: 128 MiB in fp32
CACHE_ELEMENTS = 2**19  # logits between two passes on a CPU: 2 MiB in fp32


def token_logprobs(
    hidden: Tensor,
    lm_head_weight: Tensor,
    token_ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    with_entropy: bool = False,
    chunk_tokens: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """log softmax(hidden @ W^T / temperature) at ``token_ids``, in fp32, differentiable in ``hidden`` and the weight.

    Logits exist for ``chunk_tokens`` tokens at a time. The backward pass recomputes them, unless one chunk held them all; then
    they are kept.

    Args:
        hidden: [..., H], aligned with ``token_ids``: the state from which each token was drawn.
        lm_head_weight: [V, H]. This and ``hidden`` are cast to autocast's dtype if autocast is on, else to the dtype of
            ``hidden`` or, if the CPU would only emulate its products, to fp32.
        token_ids: [...] int64.
        temperature: one number for all tokens, or [...] one for each token.
        with_entropy: also return the entropy of the whole distribution, in nats.
        chunk_tokens: tokens per chunk; by default the number that makes 2^25 logits.

    Returns:
        [...] fp32 log-probabilities, and [...] fp32 entropies if asked for.
    """
    chunk = chunk_tokens or max(1, CHUNK_ELEMENTS // lm_head_weight.shape[0])
    # Autocast would affect only the forward pass: the backward of a custom function runs outside of it.
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else matmul_dtype(hidden)
    flat, weight = hidden.reshape(-1, hidden.shape[-1]).to(dtype), lm_head_weight.to(dtype)
    if isinstance(temperature, Tensor):
        temperature = temperature.reshape(-1, 1)
    logprobs, entropy = _TokenLogprobs.apply(flat, weight, token_ids.reshape(-1), temperature, with_entropy, chunk)
    logprobs = logprobs.view(token_ids.shape)
    return (logprobs, entropy.view(token_ids.shape)) if with_entropy else logprobs


def logits_logprobs(logits: Tensor, token_ids: Tensor, *, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies from logits [..., V], for models whose head is more than one matrix product."""
    scale = temperature[..., None] if isinstance(temperature, Tensor) else temperature
    logprobs = (logits.to(_accumulator(logits)) / scale).log_softmax(-1)
    finite = logprobs.clamp(min=-1e3)  # exp(-1e3) is 0, so that 0 log 0 = 0, also in the gradient
    return logprobs.gather(-1, token_ids[..., None]).squeeze(-1), -(logprobs.exp() * finite).sum(-1)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        token_ids: Tensor,
        temperature: float | Tensor,
        with_entropy: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        logsumexp = hidden.new_empty(len(hidden), dtype=_accumulator(hidden))
        logprobs, entropy = torch.empty_like(logsumexp), torch.zeros_like(logsumexp)
        for start in range(0, len(hidden), chunk):
            product = hidden[start : start + chunk] @ weight.T
            for rows, part in _blocks(product, start):
                logits = _logits(product[rows], _of_part(temperature, part))
                logsumexp[part] = logits.logsumexp(-1)
                logprobs[part] = logits.gather(-1, token_ids[part, None]).squeeze(-1) - logsumexp[part]
                if with_entropy:
                    probabilities = (logits - logsumexp[part, None]).exp_()
                    # Not logsumexp - sum p l: a small difference of large numbers if the logits are large.
                    entropy[part] = torch.special.entr(probabilities).sum(-1)
        kept = product if 0 < len(hidden) <= chunk else None
        ctx.save_for_backward(hidden, weight, token_ids, logsumexp, entropy, kept)
        ctx.temperature, ctx.with_entropy, ctx.chunk = temperature, with_entropy, chunk
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, token_ids, logsumexp, entropy, kept = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        single = 0 < len(hidden) <= ctx.chunk
        # fp32 if several chunks are summed: bf16 would round after each of them.
        grad_weight = None if single else torch.zeros_like(weight, dtype=_accumulator(weight))
        for start in range(0, len(hidden), ctx.chunk):
            chunk = slice(start, start + ctx.chunk)
            product = hidden[chunk] @ weight.T if kept is None else kept
            grad = torch.empty_like(product)
            for rows, part in _blocks(product, start):
                grad[rows] = _grad_logits(
                    ctx, part, product[rows], token_ids, logsumexp, entropy, grad_logprobs, grad_entropy
                )
            grad_hidden[chunk] = grad @ weight
            if grad_weight is None:
                return grad_hidden, grad.T @ hidden, None, None, None, None
            grad_weight += grad.T @ hidden[chunk]
        assert grad_weight is not None
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _blocks(product: Tensor, start: int) -> Iterator[tuple[slice, slice]]:
    """Slices of a chunk that begins at token ``start``: of its rows, and of the tokens; on a CPU small enough for its cache."""
    size = max(1, CACHE_ELEMENTS // product.shape[1]) if product.device.type == "cpu" else len(product)
    for first in range(0, len(product), size):
        last = min(first + size, len(product))
        yield slice(first, last), slice(start + first, start + last)


def _of_part(temperature: float | Tensor, part: slice) -> float | Tensor:
    return temperature[part] if isinstance(temperature, Tensor) else temperature


def _accumulator(tensor: Tensor) -> torch.dtype:
    """fp32, or fp64 for fp64."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _logits(product: Tensor, temperature: float | Tensor) -> Tensor:
    """fp32 logits of a matrix product, which must not change; ``temperature`` is one number or [tokens, 1]."""
    logits = product.to(_accumulator(product))
    return logits if _is_one(temperature) else logits / temperature


def _is_one(temperature: float | Tensor) -> bool:
    return isinstance(temperature, float) and temperature == 1.0


def _without_nan(products: Tensor) -> Tensor:
    """Count 0 * -inf as 0 in products of probabilities and logits, in place. A NaN logit still shows in ``logsumexp``."""
    return products.nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-torch.inf)


def _grad_logits(
    ctx: Any, part: slice, product: Tensor, token_ids: Tensor, logsumexp: Tensor, entropy: Tensor, grad_logprobs: Tensor,
    grad_entropy: Tensor,
) -> Tensor:  # fmt: skip
    """d loss / d (hidden @ W^T) of one chunk [tokens, V].

    With l the logits over temperature, p their softmax and H their entropy: d logp_y / d l_j = [j = y] - p_j and
    d H / d l_j = -p_j (log p_j + H), which is 0 where l_j = -inf.
    """
    temperature = _of_part(ctx.temperature, part)
    log_p = _logits(product, temperature) - logsumexp[part, None]
    p = log_p.exp()
    grad = p * -grad_logprobs[part, None]
    if ctx.with_entropy:
        grad -= _without_nan(p.mul_(log_p.add_(entropy[part, None]))).mul_(grad_entropy[part, None])
    grad.scatter_add_(-1, token_ids[part, None], grad_logprobs[part, None])
    return grad if _is_one(temperature) else grad.div_(temperature)
