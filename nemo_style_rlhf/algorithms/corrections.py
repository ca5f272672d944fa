"""Importance weights for what separates the sampler's distribution from the trainer's: other kernels, other precision."""

import torch
from torch import Tensor

from nemo_style_rlhf.algorithms.masking import zero_masked

MAX_LOG_WEIGHT = 20.0


@torch.no_grad()
def importance_weights(
    trainer_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    level: str,
    mode: str,
    low: float,
    high: float,
) -> Tensor:
    """w = exp(trainer - sampler) per token [batch, time], bounded; to multiply the policy loss with. No gradient.

    ``token``/``clip``: w clamped to low..high, truncated importance sampling (TIS, Yao et al. 2025, "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training"). ``token``/``mask``: w inside low..high, else 0 (IcePop, the
    Ling team 2025, "Small Leak Can Sink a Great Ship"). ``sequence``/``mask``: a sequence whose geometric mean of w lies
    outside of low..high gets 0, the others keep their per-token w.

    Args:
        trainer_logprobs: of the policy before its update, nats.

    Returns:
        [batch, time]; 0 under mask 0.

    Raises:
        ValueError: another pair of level and mode.
    """
    log_weights = zero_masked(trainer_logprobs, mask) - zero_masked(sampler_logprobs, mask)
    weights = zero_masked(log_weights.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp(), mask)
    if (level, mode) == ("token", "clip"):
        return zero_masked(weights.clamp(low, high), mask)
    if (level, mode) == ("token", "mask"):
        return weights * ((weights >= low) & (weights <= high))
    if (level, mode) == ("sequence", "mask"):
        geometric_mean = (log_weights.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).exp()
        return weights * ((geometric_mean >= low) & (geometric_mean <= high))
    raise ValueError(
        f"correction level {level!r} with mode {mode!r} is unknown: expected token/clip, token/mask or sequence/mask"
    )
