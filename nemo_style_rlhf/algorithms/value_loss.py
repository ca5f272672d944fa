"""The critic's clipped value loss."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_style_rlhf.algorithms.masking import aggregate, deviations, masked_mean, zero_masked


@dataclass
class ValueLoss:
    """Scalars; ``loss`` carries the gradient."""

    loss: Tensor
    clip_fraction: Tensor
    """Share of tokens whose clipped error is the larger one."""
    explained_variance: Tensor
    """1 - Var(returns - values) / Var(returns) over the unmasked tokens of this call, in float64; 0 if all returns are equal."""


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float | None,
    normalizer: float | Tensor | None = None,
) -> ValueLoss:
    """0.5 * mean(max((V - R)^2, (clamp(V, V_old - clip, V_old + clip) - R)^2)), all tensors [batch, time].

    This is PPO's value clipping (arXiv 2005.12729, section 3; arXiv 2403.17031, detail 12); ``clip=None`` turns it off.
    ``normalizer`` is the token count of the whole optimizer step (see :func:`masking.aggregate`).
    """
    values, old_values, returns = (zero_masked(x, mask) for x in (values, old_values, returns))
    squared = (values - returns).square()
    clipped = squared
    if clip is not None:
        # Not old + clamp(V - old): its rounding would count as clipping.
        clipped = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    per_token = 0.5 * torch.maximum(squared, clipped)
    with torch.no_grad():
        residual = _variance(returns - values, mask)
        total = _variance(returns, mask)
        explained = 1 - residual / total if total > 0 else torch.zeros_like(total)
        clip_fraction = masked_mean((clipped > squared).to(values.dtype), mask)
    return ValueLoss(aggregate(per_token, mask, mode="token_mean", normalizer=normalizer), clip_fraction, explained)


def _variance(x: Tensor, mask: Tensor) -> Tensor:
    return masked_mean(deviations(x.flatten(), mask.flatten()).view_as(x).square(), mask)
