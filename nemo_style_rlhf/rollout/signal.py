"""From scores, KL and values to what each token learns: shaping, then the advantage estimator."""

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
class Signal:
    """[batch, time] each, 0 where nothing is learned."""

    rewards: Tensor
    """Score at the last action, and the KL penalty where it is part of the reward."""
    advantages: Tensor
    returns: Tensor | None
    """What the critic learns, where there is one."""
    equal_groups: float | None
    """Share of the groups in which there is nothing to compare, of those with any sample; None with one sample per prompt."""


def shape_scores(
    scores: Tensor, failed: Tensor, lengths: Tensor, truncated: Tensor, config: AlgorithmConfig, *, max_length: Tensor | int,
    normalizer: RunningNormalizer,
) -> Tensor:  # fmt: skip
    """Scores [B] normalised, clipped, then charged for length or replaced; before any baseline sees them.

    Args:
        failed: [B] bool, samples without a score: they get 0 and stay out of the running statistics.
        lengths: [B] response tokens.
        truncated: [B] bool.
        max_length: tokens that each response, [B], or all of them might have had; overlong_buffer is at most that.
    """
    shaping = config.shaping
    if shaping.normalize == "running":
        normalizer.update(scores[~failed])
        scores = normalizer.normalize(scores)
    scores = clip_scores(scores, low=shaping.clip_low, high=shaping.clip_high)
    if shaping.overlong_buffer:
        limits = torch.as_tensor(max_length)
        buffer = limits.clamp(max=shaping.overlong_buffer)
        scores = scores + overlong_penalty(lengths, max_length=limits, buffer=buffer, factor=shaping.overlong_factor)
    if config.truncated_samples == "penalise":
        scores = truncation_penalty(scores, truncated, coef=config.truncation_penalty)
    elif config.truncated_samples == "replace":
        scores = scores.masked_fill(truncated, config.truncation_penalty)
    return scores.masked_fill(failed, 0.0)


def estimate(
    scores: Tensor, kl: Tensor, values: Tensor | None, mask: Tensor, config: AlgorithmConfig, *, kl_coef: float,
    learned: Tensor | None = None,
) -> Signal:  # fmt: skip
    """Advantages of every token, by ``config.advantage_estimator``.

    The estimators that compare responses to one prompt take the whole response's KL penalty into its score (TRL's
    RLOO), where ``kl_in`` is reward; the others put it on each token.

    Args:
        scores: [B], shaped, ``samples_per_prompt`` neighbours to each prompt.
        kl: [B, T].
        values: [B, T], for gae.
        mask: [B, T], all actions of the samples that have a score; a sequence without actions is no part of its group.
        learned: [B, T], the actions of ``mask`` that train (default all): the others are compared with, but get 0 and are no
            part of whitening.
    """
    learned = mask if learned is None else learned
    penalty = kl_coef if config.kl_in == "reward" else 0.0
    rewards = place_rewards(scores, kl if penalty else torch.zeros_like(kl), mask, kl_coef=penalty)
    group_size, kept = config.samples_per_prompt, mask.bool().any(-1)
    # In float64, and not the sum of ``rewards``: in fp32 a small KL is rounded away beside a large score.
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
        advantages = masked_whiten(advantages, learned)
    return Signal(
        zero_masked(rewards, learned),
        zero_masked(advantages, learned),
        None if returns is None else zero_masked(returns, learned),
        equal_groups=equal_share(compared, group_size, keep=kept) if group_size > 1 else None,
    )
