"""Advantages and returns from per-token rewards and values.

All tensors are [batch, time], aligned to actions: entry t is the state before the action whose ``mask`` entry is 1.
Entries under mask 0 (prompt, padding, text an environment inserted) are skipped, not stepped through: the value after a
gap is that of the next unmasked entry, as in verl.
"""

import torch
from torch import Tensor

from nemo_style_rlhf.algorithms.masking import zero_masked


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv 1506.02438, eq. 16); the state after the last action is worth 0.

    delta_t = r_t + gamma * V_{t+1} - V_t and A_t = delta_t + gamma * lam * A_{t+1}.

    Returns:
        Advantages, not whitened, and returns A + V; both 0 under mask 0.
    """
    rewards, values = zero_masked(rewards, mask), zero_masked(values, mask)
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0])
    next_advantage = torch.zeros_like(next_value)
    for t in reversed(range(values.shape[1])):
        active = mask[:, t].bool()
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = torch.where(active, advantage, 0)
        next_value = torch.where(active, values[:, t], next_value)
        next_advantage = torch.where(active, advantage, next_advantage)
    return advantages, advantages + values


def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """G_t = r_t + gamma * G_{t+1} over the unmasked entries; 0 under mask 0."""
    returns, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)
    return returns
