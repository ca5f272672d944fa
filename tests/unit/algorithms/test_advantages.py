"""Group advantages, corrections, KL controllers and reward shaping against loops and numbers derived by hand."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_style_rlhf.algorithms.advantages import equal_share, group_advantages
from nemo_style_rlhf.algorithms.corrections import importance_weights
from nemo_style_rlhf.algorithms.kl import AdaptiveKLController, FixedKLController
from nemo_style_rlhf.algorithms.names import CORRECTIONS, GROUP_KINDS
from nemo_style_rlhf.algorithms.reward_shaping import RunningNormalizer, clip_scores, overlong_penalty

from .reference import assert_close, masks, noise, selected

many = settings(max_examples=200, deadline=None)
seeds = st.integers(0, 2**31)


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


def test_scores_far_from_zero_are_normalised_without_a_common_error():
    scores = 1e6 + torch.randn(4096, generator=torch.Generator().manual_seed(0))
    normalizer = RunningNormalizer()
    normalizer.update(scores)
    assert abs(float(normalizer.normalize(scores).mean())) < 1e-6  # .03 where fp32 subtracts


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
@given(
    mask=masks(), seed=seeds, kind=st.sampled_from(CORRECTIONS), low=st.floats(0, 1), high=st.floats(1, 4),
)  # fmt: skip
def test_importance_weights_match_a_loop(mask, seed, kind, low, high):
    trainer, sampler = noise(mask, seed), noise(mask, seed + 1)
    weights = importance_weights(trainer, sampler, mask, kind=kind, low=low, high=high)
    for row in range(len(mask)):
        logs = selected(trainer[row : row + 1] - sampler[row : row + 1], mask[row : row + 1])
        each = [math.exp(x) for x in logs]
        if kind == "tis":
            expected = [min(max(w, low), high) for w in each]
        elif kind == "icepop":
            expected = [w if low <= w <= high else 0.0 for w in each]
        else:
            inside = bool(logs) and low <= math.exp(sum(logs) / len(logs)) <= high
            expected = each if inside else [0.0] * len(each)
        assert_close(selected(weights[row : row + 1], mask[row : row + 1]), expected)
    assert (weights[mask == 0] == 0).all()


def test_other_corrections_are_refused():
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="'clip' is unknown: expected one of tis"):
        importance_weights(one, one, one, kind="clip", low=0, high=2)


def test_kl_controllers_by_hand():
    fixed = FixedKLController(0.1)
    fixed.update(100.0, 64)
    assert fixed.coef == 0.1
    adaptive = AdaptiveKLController(0.1, target=6.0, horizon=1000)
    adaptive.update(6.6, 100)  # error .1: 0.1 * (1 + .1 * .1)
    assert_close(adaptive.coef, 0.101)
    adaptive.update(1000.0, 100)  # the error is clipped at .2
    assert_close(adaptive.coef, 0.101 * 1.02)
    adaptive.update(0.0, 100)
    assert_close(adaptive.coef, 0.101 * 1.02 * 0.98)


def test_one_large_rollout_cannot_take_the_kl_coefficient_to_0_or_below():
    # 512 samples, horizon 64: the multiplier 1 - .2 * 8 = -.6 is bounded by its least; upwards 1 + .2 * 8 = 2.6 as published
    adaptive = AdaptiveKLController(0.1, target=6.0, horizon=64, min_multiplier=0.25)
    adaptive.update(0.0, 512)
    assert_close(adaptive.coef, 0.025)
    adaptive.update(math.inf, 512)
    assert_close(adaptive.coef, 0.065)


def test_a_kl_that_is_no_number_does_not_steer():
    adaptive = AdaptiveKLController(0.1, target=6.0, horizon=1000)
    adaptive.update(math.nan, 100)
    assert adaptive.coef == 0.1


def test_overlong_penalty_by_hand():
    # maximum 100, buffer 20: free up to 80, half way at 90, the full factor at 100
    lengths = torch.tensor([10, 80, 90, 100, 120])
    assert_close(overlong_penalty(lengths, max_length=100, buffer=20, factor=2.0), [0, 0, -1, -2, -2])


def test_scores_are_clipped_on_the_sides_that_are_given():
    scores = torch.tensor([-5.0, 0, 5])
    assert_close(clip_scores(scores, low=-1, high=None), [-1, 0, 5])
    assert_close(clip_scores(scores, low=None, high=None), scores)


@many
@given(seed=seeds, sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_running_normalizer_knows_the_moments_of_all_it_saw(seed, sizes):
    scores = 3 + 2 * torch.randn(sum(sizes), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    normalizer = RunningNormalizer()
    for batch in scores.split(sizes):
        normalizer.update(batch)
    values = scores.tolist()
    variance = statistics.variance(values) if len(values) > 1 else 1.0
    mean = statistics.fmean(values) if values else 0.0
    assert_close(normalizer.normalize(scores), [(x - mean) / math.sqrt(variance + 1e-8) for x in values])
    again = RunningNormalizer()
    again.load_state_dict(normalizer.state_dict())
    assert torch.equal(again.normalize(scores), normalizer.normalize(scores))
