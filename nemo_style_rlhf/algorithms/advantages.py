"""Advantages and returns: from per-token rewards and values, or from the scores of a group of responses.

Per-token tensors are [batch, time], aligned to actions: entry t is the state before the action whose ``mask`` entry is 1.
Entries under mask 0 (prompt, padding, text an environment inserted) are skipped, not stepped through: the value after a
gap is the value of the next unmasked entry, as in verl.
"""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nemo_style_rlhf.algorithms.masking import deviations
from nemo_style_rlhf.algorithms.names import GROUP_KINDS


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv 1506.02438, eq. 16); the state after the last action is worth 0.

    delta_t = r_t + gamma * V_{t+1} - V_t and A_t = delta_t + gamma * lam * A_{t+1}.

    Returns:
        Advantages, not whitened, and returns A + V; both 0 under mask 0.
    """
    active = mask.bool()
    counts = active.sum(-1)
    rewards, values = rewards[active], values[active]  # [number of actions], row by row
    following = values.roll(-1)
    following[counts.cumsum(0)[counts > 0] - 1] = 0
    deltas = (rewards + gamma * following - values).split(counts.tolist())
    by_time = pad_sequence(deltas, batch_first=True, padding_side="left").t().contiguous()  # all end at the same time
    later = by_time.new_zeros(len(mask))
    backwards = [later]
    for delta in by_time.flip(0).unbind():
        later = delta + gamma * lam * later
        backwards.append(later)
    rows = torch.stack(backwards).flip(0).t().contiguous()
    advantages = torch.cat([row[-1 - count : -1] for row, count in zip(rows, counts.tolist(), strict=True)])
    blank = advantages.new_zeros(mask.shape)
    return blank.masked_scatter(active, advantages), blank.masked_scatter(active, advantages + values)


def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """G_t = r_t + gamma * G_{t+1} over the unmasked entries; 0 under mask 0."""
    returns, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)
    return returns


def group_advantages(
    scores: Tensor, group_size: int, *, kind: str, eps: float = 1e-6, keep: Tensor | None = None
) -> Tensor:
    """Compare each score with the scores of the other responses to the same prompt. These are consecutive in ``scores`` [n].

    ``grpo``: (r - mean) / (std + eps) with the unbiased standard deviation (arXiv 2402.03300, section 4.1.2); eps is
    1e-6 in verl and slime, 1e-4 in TRL, 1e-9 in OpenRLHF. ``dr_grpo`` (arXiv 2503.20783, eq. 4) and
    ``reinforce_baseline`` (REINFORCE++-baseline, arXiv 2501.03262): r - mean. ``rloo``: r minus the mean of the others
    (arXiv 2402.14740, eq. 6). Computed in float64; equal scores give exactly 0.

    Args:
        keep: [n], 0 for a sample without a score: it gets 0 and is left out of its group. The only kept sample of a group gets 0.

    Returns:
        [n].

    Raises:
        ValueError: an unknown kind, or n is not a multiple of ``group_size``.
    """
    if kind not in GROUP_KINDS:
        raise ValueError(f"group advantage {kind!r} is unknown: expected one of {', '.join(GROUP_KINDS)}")
    if group_size < 1 or len(scores) % group_size:
        raise ValueError(f"{len(scores)} scores cannot be split into groups of {group_size}")
    kept = (torch.ones_like(scores) if keep is None else keep).bool().view(-1, group_size)
    count = kept.sum(-1, keepdim=True)
    centered = deviations(scores.view(-1, group_size), kept)
    if kind == "rloo":
        centered = centered * count / (count - 1).clamp(min=1)
    elif kind == "grpo":
        variance = centered.square().sum(-1, keepdim=True) / (count - 1).clamp(min=1)
        centered = centered / (variance.sqrt() + eps)
    return centered.flatten().to(torch.result_type(scores, 1.0))


def equal_share(scores: Tensor, group_size: int, *, keep: Tensor) -> float:
    """Share of the non-empty groups of ``scores`` [n] whose kept scores are all equal; 0 if every group is empty.

    Unless KL is part of the reward, :func:`group_advantages` gives such a group 0. TRL has this as ``frac_reward_zero_std``, but
    over samples, not groups.

    Args:
        keep: [n], 0 for a sample that is left out of its group.
    """
    kept = keep.bool().view(-1, group_size)
    differ = deviations(scores.view(-1, group_size), kept).bool().any(-1)
    used = kept.any(-1)
    return float((used & ~differ).sum() / used.sum().clamp(min=1))
