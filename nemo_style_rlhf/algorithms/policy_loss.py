"""PPO's clipped surrogate and its relatives."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_style_rlhf.algorithms.masking import aggregate, masked_mean, zero_masked

MAX_LOG_RATIO = 20.0
"""exp(20) is finite in fp32. A token above this bound has no gradient; for A > 0 the objective clips it anyway, for A < 0 it
would not."""


@dataclass
class PolicyLoss:
    """``loss`` carries the gradient; the rest is detached."""

    loss: Tensor
    ratio: Tensor
    """Mean importance ratio over the unmasked tokens, as defined by ``level``."""
    clip_fraction: Tensor
    """Share of tokens whose gradient was removed by clipping."""
    approx_kl: Tensor
    """Mean of (r - 1) - log(r) over token ratios, at either ``level``: estimates KL(old || new), never negative."""


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    level: str = "token",
    aggregation: str = "token_mean",
    normalizer: float | Tensor | None = None,
    weights: Tensor | None = None,
    whole: Tensor | None = None,
) -> PolicyLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), all tensors [batch, time] (arXiv 1707.06347, eq. 7).

    Args:
        clip_low, clip_high: unequal bounds are DAPO's clip-higher (arXiv 2503.14476, eq. 8).
        dual_clip: for A < 0 the loss is at most ``-dual_clip * A`` (arXiv 1912.09729, eq. 5); above 1.
        level: ``token`` takes r = exp(log ratio) of each token; ``sequence`` s = the exponential of its mean over the
            sequence (GSPO, arXiv 2507.18071, eq. 7) as GSPO-token (section 4.3): s_t = sg[s] pi_t / sg[pi_t]. Its value is s,
            and its gradient s grad log pi_t is multiplied by the token's own weight and advantage. If w A is the same for
            all T tokens, this is GSPO: sum_t w A s grad log pi_t = T w A grad s. Either level works with any aggregation.
        aggregation, normalizer, whole: see :func:`masking.aggregate`.
        weights: [batch, time] factors of every token's loss, see :func:`corrections.importance_weights`.

    Raises:
        ValueError: unknown level or aggregation.
    """
    log_ratio = zero_masked(logprobs, mask) - zero_masked(old_logprobs, mask)
    token_log_ratio = log_ratio.detach()
    if level == "sequence":
        mean = token_log_ratio.sum(-1, keepdim=True) / mask.bool().sum(-1, keepdim=True).clamp(min=1)
        log_ratio = zero_masked(mean + (log_ratio - token_log_ratio), mask)
    elif level != "token":
        raise ValueError(f"policy loss level {level!r} is unknown: expected token or sequence")
    ratio = _bounded(log_ratio).exp()
    advantages = zero_masked(advantages, mask)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    per_token = torch.maximum(unclipped, clipped)
    removed = clipped > unclipped
    if dual_clip is not None:
        bound = -advantages * dual_clip
        removed = removed | ((advantages < 0) & (per_token > bound))
        per_token = torch.where(advantages < 0, torch.minimum(per_token, bound), per_token)
    if weights is not None:
        per_token = per_token * zero_masked(weights, mask)
    loss = aggregate(per_token, mask, mode=aggregation, normalizer=normalizer, whole=whole)
    with torch.no_grad():
        return PolicyLoss(
            loss=loss,
            ratio=masked_mean(ratio, mask),
            clip_fraction=masked_mean(removed.to(ratio.dtype), mask),
            approx_kl=masked_mean(_bounded(token_log_ratio).expm1() - token_log_ratio, mask),
        )


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
