"""From sequence scores and per-token KL to per-token rewards."""

import torch
from torch import Tensor

from nemo_style_rlhf.algorithms.masking import zero_masked


def place_rewards(scores: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> Tensor:
    """-kl_coef * kl at every response token, plus the score at the last one (arXiv 1909.08593, eq. 2).

    Args:
        scores: [batch].
        kl: [batch, time], see :func:`kl.kl_estimate`.
        mask: [batch, time]; a sequence without response tokens gets no reward.
    """
    rewards = -kl_coef * zero_masked(kl, mask)
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = (positions * mask.bool()).argmax(-1, keepdim=True)
    return rewards.scatter_add(1, last, torch.where(mask.bool().any(-1), scores.to(rewards.dtype), 0)[:, None])


def truncation_penalty(scores: Tensor, truncated: Tensor, *, coef: float) -> Tensor:
    """Scores [batch] with ``coef`` added where ``truncated`` [batch] bool: -1 in arXiv 2403.17031, detail 3."""
    return scores + coef * truncated.to(scores.dtype)
