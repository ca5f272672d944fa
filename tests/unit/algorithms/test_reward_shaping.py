"""Where scores land, and how they are normalised, clipped and charged."""

import math
import statistics

import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_style_rlhf.algorithms.reward_shaping import (
    RunningNormalizer,
    clip_scores,
    overlong_penalty,
    place_rewards,
    truncation_penalty,
)

from .reference import assert_close, many, seeds


def test_the_score_lands_on_the_last_response_token_beside_the_kl_penalty():
    mask = torch.tensor([[0.0, 1, 0, 1, 0], [0, 0, 0, 0, 0]])
    kl = torch.tensor([[math.nan, 2, 7, 3, 1]], dtype=torch.float64).repeat(2, 1)
    rewards = place_rewards(torch.tensor([10.0, 5.0]), kl, mask, kl_coef=0.1)
    assert_close(rewards, [[0, -0.2, 0, 9.7, 0], [0, 0, 0, 0, 0]])


def test_truncated_samples_pay():
    scores = truncation_penalty(torch.tensor([1.0, 2.0]), torch.tensor([True, False]), coef=-1.0)
    assert_close(scores, [0.0, 2.0])


def test_scores_far_from_zero_are_normalised_without_a_common_error():
    scores = 1e6 + torch.randn(4096, generator=torch.Generator().manual_seed(0))
    normalizer = RunningNormalizer()
    normalizer.update(scores)
    assert abs(float(normalizer.normalize(scores).mean())) < 1e-6  # .03 where fp32 subtracts


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
