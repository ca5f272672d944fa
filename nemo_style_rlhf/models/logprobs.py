"""Log-probabilities and entropies of given tokens without the [batch, time, vocabulary] logits in memory."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nemo_style_rlhf.models.compiled import compiled_once
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
    compiled: bool = False,
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
        compiled: torch.compile what is between the products.

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
    logprobs, entropy = _TokenLogprobs.apply(
        flat, weight, token_ids.reshape(-1), temperature, with_entropy, chunk, compiled
    )
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
        compiled: bool,
    ) -> tuple[Tensor, Tensor]:
        logsumexp = hidden.new_empty(len(hidden), dtype=_accumulator(hidden))
        logprobs, entropy = torch.empty_like(logsumexp), torch.zeros_like(logsumexp)
        statistics = compiled_once(_statistics) if compiled else _statistics
        for start in range(0, len(hidden), chunk):
            product = hidden[start : start + chunk] @ weight.T
            for rows, part in _blocks(product, start, whole=compiled):
                logsumexp[part], logprobs[part], entropy[part] = statistics(
                    product[rows], token_ids[part], _of_part(temperature, part), with_entropy
                )
        kept = product if 0 < len(hidden) <= chunk else None
        ctx.save_for_backward(hidden, weight, token_ids, logsumexp, entropy, kept)
        ctx.temperature, ctx.with_entropy, ctx.chunk, ctx.compiled = temperature, with_entropy, chunk, compiled
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, token_ids, logsumexp, entropy, kept = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_logits = compiled_once(_grad_logits) if ctx.compiled else _grad_logits
        single = 0 < len(hidden) <= ctx.chunk
        # fp32 if several chunks are summed: bf16 would round after each of them.
        grad_weight = None if single else torch.zeros_like(weight, dtype=_accumulator(weight))
        for start in range(0, len(hidden), ctx.chunk):
            chunk = slice(start, start + ctx.chunk)
            product = hidden[chunk] @ weight.T if kept is None else kept
            grad = torch.empty_like(product)
            for rows, part in _blocks(product, start, whole=ctx.compiled):
                block = grad_logits(
                    product[rows], token_ids[part], _of_part(ctx.temperature, part), logsumexp[part], grad_logprobs[part],
                    *((entropy[part], grad_entropy[part]) if ctx.with_entropy else ()),
                )  # fmt: skip
                if len(block) == len(product):
                    grad = block
                else:
                    grad[rows] = block
            grad_hidden[chunk] = grad @ weight
            if grad_weight is None:
                return grad_hidden, grad.T @ hidden, None, None, None, None, None
            grad_weight += grad.T @ hidden[chunk]
        assert grad_weight is not None
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _blocks(product: Tensor, start: int, *, whole: bool) -> Iterator[tuple[slice, slice]]:
    """Slices of a chunk that begins at token ``start``: of its rows, and of the tokens; on a CPU small enough for its cache
    unless ``whole``."""
    size = max(1, CACHE_ELEMENTS // product.shape[1]) if product.device.type == "cpu" and not whole else len(product)
    for first in range(0, len(product), size):
        last = min(first + size, len(product))
        yield slice(first, last), slice(start + first, start + last)


def _of_part(temperature: float | Tensor, part: slice) -> float | Tensor:
    return temperature[part] if isinstance(temperature, Tensor) else temperature


def _accumulator(tensor: Tensor) -> torch.dtype:
    """fp32, or fp64 for fp64."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _logits(product: Tensor, temperature: float | Tensor) -> Tensor:
    """fp32 logits of a matrix product, for reading only; ``temperature`` is one number or [tokens, 1]."""
    logits = product.to(_accumulator(product))
    return logits if _is_one(temperature) else logits / temperature


def _is_one(temperature: float | Tensor) -> bool:
    return isinstance(temperature, float) and temperature == 1.0


def _without_nan(products: Tensor) -> Tensor:
    """Count 0 * -inf as 0 in products of probabilities and logits, in place. A NaN logit still shows in ``logsumexp``."""
    return products.nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-torch.inf)


def _statistics(
    product: Tensor, token_ids: Tensor, temperature: float | Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | float]:
    """Per token of a chunk [tokens, V], the logsumexp of its logits, the log-probability of its id, and the entropy; 0 unless
    asked for."""
    logits = _logits(product, temperature)
    logsumexp = logits.logsumexp(-1)
    logprobs = logits.gather(-1, token_ids[:, None]).squeeze(-1) - logsumexp
    if not with_entropy:
        return logsumexp, logprobs, 0.0
    probabilities = (logits - logsumexp[:, None]).exp_()
    # Not logsumexp - sum p l: a small difference of large numbers if the logits are large.
    return logsumexp, logprobs, torch.special.entr(probabilities).sum(-1)


def _grad_logits(
    product: Tensor, token_ids: Tensor, temperature: float | Tensor, logsumexp: Tensor, grad_logprobs: Tensor,
    entropy: Tensor | None = None, grad_entropy: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """d loss / d (hidden @ W^T) of one chunk [tokens, V]; the other tensors are [tokens].

    With l the logits over temperature, p their softmax and H their entropy: d logp_y / d l_j = [j = y] - p_j and
    d H / d l_j = -p_j (log p_j + H), which is 0 where l_j = -inf.
    """
    log_p = _logits(product, temperature) - logsumexp[:, None]
    p = log_p.exp()
    grad = p * -grad_logprobs[:, None]
    if entropy is not None and grad_entropy is not None:
        grad -= _without_nan(p.mul_(log_p.add_(entropy[:, None]))).mul_(grad_entropy[:, None])
    if torch.compiler.is_compiling():  # a scatter would be a pass of its own
        own = torch.arange(product.shape[1], device=product.device) == token_ids[:, None]
        grad = torch.where(own, grad + grad_logprobs[:, None], grad)
    else:
        grad.scatter_add_(-1, token_ids[:, None], grad_logprobs[:, None])
    grad = grad if _is_one(temperature) else grad.div_(temperature)
    return grad.to(product.dtype)
