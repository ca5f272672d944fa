"""Turns scores, KL and values into the training signal of each token: shaping, then the advantage estimator."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_style_rlhf.algorithms.advantages import discounted_returns, equal_share, gae, group_advantages
from nemo_style_rlhf.algorithms.masking import masked_whiten, zero_masked
from nemo_style_rlhf.algorithms.reward_shaping import (
    RunningNormalizer,
    clip_scores,
    overlong_penalty,
    place_rewards,
    truncation_penalty,
)
from nemo_style_rlhf.schema.algorithm import AlgorithmConfig


@dataclass
class Shaped:
    """Scores, and how shaping changed them: ``scale * raw + offset``, and penalties for length."""

    scores: Tensor
    """[B]."""
    scale: Tensor
    """[B], at least 0: multiplies the rewards of turns."""
    offset: Tensor
    """[B]: the part that no turn earned."""


@dataclass
class Signal:
    """Tensors are [batch, time], 0 except at loss tokens."""

    rewards: Tensor
    """Score at the last action, and the KL penalty if it is part of the reward."""
    advantages: Tensor
    returns: Tensor | None
    """Training targets of the critic; None without a critic."""
    equal_groups: float | None
    """Share of non-empty groups whose scores are all equal, whatever their KL penalties; None with one sample per prompt."""


def shape_scores(
    scores: Tensor, failed: Tensor, lengths: Tensor, truncated: Tensor, config: AlgorithmConfig, *, max_length: Tensor | int,
    normalizer: RunningNormalizer,
) -> Shaped:  # fmt: skip
    """Normalize and clip scores [B], then penalize length or replace scores, all before any baseline sees them.

    Args:
        failed: [B] bool, samples without a score: they get 0 and stay out of the running statistics.
        lengths: [B] response tokens.
        truncated: [B] bool.
        max_length: limit on response tokens, one for all or [B]; overlong_buffer is at most that.
    """
    shaping = config.shaping
    scale, offset = torch.ones_like(scores), torch.zeros_like(scores)
    if shaping.normalize == "running":
        normalizer.update(scores[~failed])
        scores = normalizer.normalize(scores)
        offset = normalizer.normalize(offset)
        scale = normalizer.normalize(scale) - offset
    whole, scores = scores, clip_scores(scores, low=shaping.clip_low, high=shaping.clip_high)
    kept = torch.where(whole == 0, 1.0, (scores / whole).clamp(0, 1))
    scale, offset = scale * kept, offset * kept + (scores - whole * kept)
    if shaping.overlong_buffer:
        limits = torch.as_tensor(max_length)
        buffer = limits.clamp(max=shaping.overlong_buffer)
        scores = scores + overlong_penalty(lengths, max_length=limits, buffer=buffer, factor=shaping.overlong_factor)
    if config.truncated_samples == "penalise":
        scores = truncation_penalty(scores, truncated, coef=config.truncation_penalty)
    elif config.truncated_samples == "replace":
        scores = scores.masked_fill(truncated, config.truncation_penalty)
        scale, offset = scale.masked_fill(truncated, 0.0), offset.masked_fill(truncated, 0.0)
    return Shaped(*(each.masked_fill(failed, 0.0) for each in (scores, scale, offset)))


def estimate(
    scores: Tensor, kl: Tensor, values: Tensor | None, mask: Tensor, config: AlgorithmConfig, *, kl_coef: float,
    learned: Tensor | None = None, early: Tensor | None = None,
) -> Signal:  # fmt: skip
    """Advantages of every token, by ``config.advantage_estimator``.

    If ``kl_in`` is reward, the estimators that compare responses to one prompt add the whole response's KL penalty to its
    score (as TRL's RLOO does); the others put it on each token.

    Args:
        scores: [B], shaped, ``samples_per_prompt`` consecutive ones per prompt.
        kl: [B, T].
        values: [B, T], for gae.
        mask: [B, T], all actions of the samples that have a score; a sequence without actions is left out of its group.
        learned: [B, T], the loss tokens among the actions of ``mask`` (default all). The others count in comparisons of a
            group, but get 0 and are left out of whitening.
        early: [B, T], the parts of the scores that belong to earlier actions than the last (default none). Estimators that
            compare whole responses do not look at them.
    """
    learned = mask if learned is None else learned
    penalty = kl_coef if config.kl_in == "reward" else 0.0
    early = None if early is None else zero_masked(early, mask)
    last = scores if early is None else scores - early.sum(-1).to(scores.dtype)
    rewards = place_rewards(last, kl if penalty else torch.zeros_like(kl), mask, kl_coef=penalty)
    rewards = rewards if early is None else rewards + early
    group_size = config.samples_per_prompt
    if group_size > 1:
        kept = mask.bool().any(-1)
        # In float64, and not from the sum of ``rewards``: in fp32 a small KL is rounded away beside a large score.
        compared = scores.double() - (penalty * zero_masked(kl, mask).double().sum(-1) if penalty else 0)
    returns = None
    if config.advantage_estimator == "gae":
        assert values is not None
        advantages, returns = gae(rewards, values, mask, gamma=config.discount_factor, lam=config.gae_lambda)
    elif config.advantage_estimator == "reinforce":
        advantages = discounted_returns(rewards, mask, gamma=config.discount_factor)
    else:
        relative = group_advantages(
            compared, group_size, kind=config.advantage_estimator, eps=config.group_eps, keep=kept
        )
        advantages = relative.to(rewards.dtype)[:, None].expand_as(mask)
    if config.normalize_advantages:
        advantages = masked_whiten(advantages, learned, divide=config.advantage_std_norm)
    return Signal(
        zero_masked(rewards, learned),
        zero_masked(advantages, learned),
        None if returns is None else zero_masked(returns, learned),
        equal_groups=equal_share(scores, group_size, keep=kept) if group_size > 1 else None,
    )
