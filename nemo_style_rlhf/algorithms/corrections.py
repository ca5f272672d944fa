"""Importance weights that correct for the sampler's distribution: its kernels and precision differ from the trainer's."""

import torch
from torch import Tensor

from nemo_style_rlhf.algorithms.masking import zero_masked
from nemo_style_rlhf.algorithms.names import CORRECTIONS

MAX_LOG_WEIGHT = 20.0


@torch.no_grad()
def importance_weights(
    trainer_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    kind: str,
    low: float,
    high: float,
) -> Tensor:
    """w = exp(trainer - sampler) per token [batch, time], bounded: factors of the policy loss, without gradient.

    ``tis``: w clamped to low..high, truncated importance sampling (Yao et al. 2025, "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training"). ``icepop``: w inside low..high, else 0 (the Ling team 2025, "Small Leak Can Sink a
    Great Ship"). ``sequence_mask``: a sequence whose geometric mean of w lies outside of low..high gets 0, the others keep
    their per-token w.

    Args:
        trainer_logprobs: log-probabilities under the policy before its update, nats.

    Returns:
        [batch, time]; 0 under mask 0.

    Raises:
        ValueError: unknown kind.
    """
    log_weights = zero_masked(trainer_logprobs, mask) - zero_masked(sampler_logprobs, mask)
    weights = zero_masked(log_weights.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp(), mask)
    if kind == "tis":
        return zero_masked(weights.clamp(low, high), mask)
    if kind == "icepop":
        return weights * ((weights >= low) & (weights <= high))
    if kind == "sequence_mask":
        geometric_mean = (log_weights.sum(-1, keepdim=True) / mask.bool().sum(-1, keepdim=True).clamp(min=1)).exp()
        return weights * ((geometric_mean >= low) & (geometric_mean <= high))
    raise ValueError(f"correction {kind!r} is unknown: expected one of {', '.join(CORRECTIONS)}")
