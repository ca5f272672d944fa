"""Means, whitening and loss aggregation over masked tensors.

``mask`` is [batch, time], 1 where an element counts. Masks may have gaps and ragged ends; elements under mask 0 may have any
value, NaN included, and never reach a result or a gradient.
"""

import torch
from torch import Tensor

from nemo_style_rlhf.algorithms.names import AGGREGATIONS


def zero_masked(x: Tensor, mask: Tensor) -> Tensor:
    """``x`` with zeros under mask 0; unlike ``x * mask`` this stops NaN, also in the gradient."""
    return torch.where(mask.bool(), x, torch.zeros_like(x))


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of the unmasked elements, a scalar; 0 if there are none."""
    return zero_masked(x, mask).sum() / mask.bool().sum().clamp(min=1)


def deviations(x: Tensor, mask: Tensor) -> Tensor:
    """Each unmasked element of a row [..., n] minus the mean of the row's unmasked elements, in float64; 0 under mask 0.

    The first unmasked element is subtracted before the mean is taken, so that equal elements deviate by exactly 0. Otherwise,
    whitening would scale the rounding error of their mean up to unit variance.
    """
    kept = mask.bool()
    first = kept.to(torch.uint8).argmax(-1, keepdim=True)
    x = zero_masked(x, mask).double()
    # In place from here on: fresh memory for the float64 tensors of a whole rollout costs more than the arithmetic.
    x = x.sub_(x.detach().gather(-1, first)).masked_fill_(~kept, 0)
    return x.sub_(x.sum(-1, keepdim=True) / kept.sum(-1, keepdim=True).clamp(min=1)).masked_fill_(~kept, 0)


def masked_whiten(x: Tensor, mask: Tensor, *, divide: bool = True, eps: float = 1e-8) -> Tensor:
    """Shift the unmasked elements to zero mean and, unless ``divide`` is false, scale them to unit variance (Bessel-corrected).

    Computes ``(x - mean) * rsqrt(var + eps)`` over all unmasked elements of the batch, as TRL and verl do, in float64. With
    fewer than two unmasked elements the variance is 0; equal elements give exactly 0.

    Returns:
        [batch, time]; 0 under mask 0.
    """
    centered = deviations(x.flatten(), mask.flatten()).view_as(x)
    if divide:
        variance = centered.square().sum() / (mask.bool().sum() - 1).clamp(min=1)
        centered = centered * torch.rsqrt(variance + eps)
    return centered.to(torch.result_type(x, 1.0))


def aggregate(
    per_token: Tensor, mask: Tensor, *, mode: str, normalizer: float | Tensor | None = None, whole: Tensor | None = None
) -> Tensor:
    """Reduce per-token losses [batch, time] to a scalar.

    If ``normalizer`` is the count of tokens or sequences of the whole optimizer step, the results of its micro-batches add up
    to the loss of the step, however it was split.

    Args:
        mode: ``token_mean`` divides by tokens (DAPO, arXiv 2503.14476, eq. 8); ``seq_mean_token_mean`` averages each
            sequence, then divides by sequences (GRPO, arXiv 2402.03300, eq. 3); ``seq_mean_token_sum`` sums each
            sequence, then divides by sequences; ``seq_sum_constant`` divides the sum by ``normalizer``, a constant
            (Dr. GRPO, arXiv 2503.20783), locally by batch x time.
        normalizer: replaces the local count.
        whole: [batch] unmasked tokens of the sequence that a row is a part of, of which ``normalizer`` is the count; by default a
            row is a whole one.

    Sequences without an unmasked token do not count as sequences.

    Raises:
        ValueError: unknown mode.
    """
    masked = zero_masked(per_token, mask)
    tokens = mask.bool().sum(-1)
    sequences = (tokens > 0).sum()
    if mode == "token_mean":
        total, count = masked.sum(), tokens.sum()
    elif mode == "seq_mean_token_mean":
        total, count = (masked.sum(-1) / (tokens if whole is None else whole).clamp(min=1)).sum(), sequences
    elif mode == "seq_mean_token_sum":
        total, count = masked.sum(), sequences
    elif mode == "seq_sum_constant":
        total, count = masked.sum(), torch.tensor(mask.numel())
    else:
        raise ValueError(f"aggregation {mode!r} is unknown: expected one of {', '.join(AGGREGATIONS)}")
    return total / (count.clamp(min=1) if normalizer is None else normalizer)
