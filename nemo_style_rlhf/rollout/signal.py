"""From scores, KL and values to what each token learns: shaping, then the advantage estimator."""

from dataclasses import dataclass

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
    """[batch, time] each, 0 where the mask is."""

    rewards: Tensor
    """Score at the last action, and the KL penalty where it is part of the reward."""
    advantages: Tensor
    returns: Tensor | None
    """What the critic learns, where there is one."""
    equal_groups: float | None
    """Share of the groups whose rewards are all equal, of those with any sample; None with one sample per prompt."""


def shape_scores(
    scores: Tensor, failed: Tensor, lengths: Tensor, truncated: Tensor, config: AlgorithmConfig, *, max_length: int,
    normalizer: RunningNormalizer,
) -> Tensor:  # fmt: skip
    """Scores [B] normalised, clipped, then charged for length; before any baseline sees them.

    Args:
        failed: [B] bool, samples without a score: they get 0 and stay out of the running statistics.
        lengths: [B] response tokens.
        truncated: [B] bool.
    """
    shaping = config.shaping
    if shaping.normalize == "running":
        normalizer.update(scores[~failed])
        scores = normalizer.normalize(scores)
    scores = clip_scores(scores, low=shaping.clip_low, high=shaping.clip_high)
    if shaping.overlong_buffer:
        penalty = overlong_penalty(
            lengths, max_length=max_length, buffer=shaping.overlong_buffer, factor=shaping.overlong_factor
        )
        scores = scores + penalty
    if config.truncated_samples == "penalise":
        scores = truncation_penalty(scores, truncated, coef=config.truncation_penalty)
    return scores.masked_fill(failed, 0.0)


def estimate(
    scores: Tensor, kl: Tensor, values: Tensor | None, mask: Tensor, config: AlgorithmConfig, *, kl_coef: float
) -> Signal:
    """Advantages of every token, by ``config.advantage_estimator``.

    The estimators that compare responses to one prompt take the whole response's KL penalty into its score (TRL's
    RLOO), where ``kl_in`` is reward; the others put it on each token.

    Args:
        scores: [B], shaped, ``samples_per_prompt`` neighbours to each prompt.
        kl: [B, T].
        values: [B, T], for gae.
        mask: [B, T]; a sequence without actions is no part of its group.
    """
    penalty = kl_coef if config.kl_in == "reward" else 0.0
    rewards = place_rewards(scores, kl, mask, kl_coef=penalty)
    compared, kept = rewards.sum(-1), mask.bool().any(-1)
    equal_groups = None
    if config.samples_per_prompt > 1:
        equal_groups = equal_share(compared, config.samples_per_prompt, keep=kept)
    returns = None
    if config.advantage_estimator == "gae":
        assert values is not None
        advantages, returns = gae(rewards, values, mask, gamma=config.discount_factor, lam=config.gae_lambda)
    elif config.advantage_estimator == "reinforce":
        advantages = discounted_returns(rewards, mask, gamma=config.discount_factor)
    else:
        relative = group_advantages(
            compared, config.samples_per_prompt, kind=config.advantage_estimator, eps=config.group_eps, keep=kept
        )
        advantages = zero_masked(relative[:, None].expand_as(mask), mask)
    if config.normalize_advantages:
        advantages = masked_whiten(advantages, mask)
    return Signal(rewards, advantages, returns, equal_groups)
