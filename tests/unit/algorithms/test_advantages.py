"""Advantages along a response and within a group against loops and numbers derived by hand."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_style_rlhf.algorithms.advantages import discounted_returns, equal_share, gae, group_advantages
from nemo_style_rlhf.algorithms.names import GROUP_KINDS

from . import reference
from .reference import assert_close, many, masks, noise, seeds, unit


def group_reference(group: list[float], kept: list[bool], kind: str, eps: float) -> list[float]:
    scores = [score for score, keep in zip(group, kept, strict=True) if keep]
    result = []
    for score, keep in zip(group, kept, strict=True):
        if not keep or len(scores) < 2:
            result.append(0.0)
        elif kind == "rloo":
            result.append(score - (sum(scores) - score) / (len(scores) - 1))
        else:
            scale = statistics.stdev(scores) + eps if kind == "grpo" else 1.0
            result.append((score - statistics.fmean(scores)) / scale)
    return result


@many
@given(
    groups=st.integers(1, 4), size=st.integers(1, 5), seed=seeds, kind=st.sampled_from(GROUP_KINDS), drop=st.booleans()
)
def test_group_advantages_match_a_loop(groups, size, seed, kind, drop):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(groups * size, dtype=torch.float64, generator=generator)
    keep = torch.rand(groups * size, generator=generator) > 0.3 if drop else torch.ones(groups * size, dtype=torch.bool)
    scores[~keep] = math.nan
    expected = [
        value
        for start in range(0, len(scores), size)
        for value in group_reference(
            scores[start : start + size].tolist(), keep[start : start + size].tolist(), kind, 1e-4
        )
    ]
    assert_close(group_advantages(scores, size, kind=kind, eps=1e-4, keep=keep if drop else None), expected)


def test_group_advantages_by_hand():
    # rewards 1, 0, 0, 1: mean .5, unbiased std sqrt(1/3); the mean of the others of a 1 is 1/3
    scores = torch.tensor([1.0, 0, 0, 1], dtype=torch.float64)
    assert_close(group_advantages(scores, 4, kind="dr_grpo"), [0.5, -0.5, -0.5, 0.5])
    assert_close(group_advantages(scores, 4, kind="rloo"), [2 / 3, -2 / 3, -2 / 3, 2 / 3])
    x = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert_close(group_advantages(scores, 4, kind="grpo"), [x, -x, -x, x])


@pytest.mark.parametrize("kind", GROUP_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_scores_teach_exactly_nothing(kind, dtype):
    """Their mean is rounded: 12 times 0.7 would get .11 from GRPO in fp32, 8 times 42.1 would get .75."""
    generator = torch.Generator().manual_seed(0)
    for size, score in [(12, 0.7), (8, 42.1), (8, -1e-20), (3, 1e30), (1, 0.1)]:
        scores = torch.full((size,), score, dtype=dtype)
        advantages = group_advantages(scores, size, kind=kind, eps=1e-9)
        assert advantages.dtype == dtype and not advantages.any()
        keep = torch.rand(size, generator=generator) > 0.4
        scores[~keep] = torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype).repeat(4)[:size][~keep]
        assert not group_advantages(scores, size, kind=kind, eps=1e-9, keep=keep).any()


def test_groups_without_a_difference_are_counted_by_what_is_kept():
    # equal; different; equal but for a sample that is not kept; nothing kept, which does not count; a sample alone
    scores = torch.tensor([0.7, 0.7, 0.7, 1, 1, 2, 3, 3, math.nan, 5, 6, 7, 4, math.inf, -math.inf])
    keep = torch.tensor([1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 0, 0])
    assert equal_share(scores, 3, keep=keep) == 3 / 4
    assert equal_share(scores[:6], 3, keep=torch.zeros(6)) == 0


def test_groups_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="5 scores cannot be split into groups of 2"):
        group_advantages(torch.zeros(5), 2, kind="grpo")
    with pytest.raises(ValueError, match="group advantage 'mean'"):
        group_advantages(torch.zeros(4), 2, kind="mean")


@many
@given(mask=masks(), seed=seeds, gamma=unit, lam=unit)
def test_gae_is_the_discounted_sum_of_residuals_over_response_tokens(mask, seed, gamma, lam):
    rewards, values = noise(mask, seed), noise(mask, seed + 1)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    assert_close(advantages, reference.gae(rewards, values, mask, gamma, lam))
    assert_close(returns, advantages + values.nan_to_num())


def test_gae_by_hand():
    # gamma 0.5, lambda 0.5; delta = [0 + .5*2 - 1, 4 - 2] = [0, 2]; A_1 = 2, A_0 = 0 + .25*2 = .5
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    advantages, returns = gae(torch.tensor([[0.0, 4, 9]]), torch.tensor([[1.0, 2, 9]]), mask, gamma=0.5, lam=0.5)
    assert_close(advantages, [[0.5, 2, 0]])
    assert_close(returns, [[1.5, 4, 0]])


def test_gae_skips_a_gap_instead_of_decaying_through_it():
    # lambda .95, a reward of 1 behind a gap of 4 tokens: one decay, .95, not .95^5 = .774
    mask = torch.tensor([[1.0, 0, 0, 0, 0, 1]])
    rewards = torch.tensor([[0.0, 0, 0, 0, 0, 1]])
    advantages, _ = gae(rewards, torch.zeros(1, 6), mask, gamma=1.0, lam=0.95)
    torch.testing.assert_close(advantages[0, 0], torch.tensor(0.95))


@many
@given(mask=masks(), seed=seeds, gamma=unit)
def test_discounted_returns_follow_their_recursion(mask, seed, gamma):
    rewards = noise(mask, seed)
    expected = torch.zeros_like(mask)
    for row in range(len(mask)):
        following = 0.0
        for t in reversed(range(mask.shape[1])):
            if mask[row, t]:
                following = float(rewards[row, t]) + gamma * following
                expected[row, t] = following
    assert_close(discounted_returns(rewards, mask, gamma=gamma), expected)
