"""From scores to advantages, with numbers derived by hand."""

import math

import torch
from omegaconf import OmegaConf

from nemo_style_rlhf.algorithms.reward_shaping import RunningNormalizer
from nemo_style_rlhf.rollout.training_signal import estimate, shape_scores
from nemo_style_rlhf.schema.algorithm import AlgorithmConfig, ShapingConfig
from nemo_style_rlhf.schema.base import build
from tests.support.paths import ROOT

MASK = torch.tensor([[0.0, 1, 1, 0], [1, 0, 1, 1]])
KL = torch.tensor([[9.0, 0.1, 0.3, 9], [0.2, 9, 0.0, 0.4]])
SCORES = torch.tensor([1.0, 3.0])


def config(**overrides: object) -> AlgorithmConfig:
    return AlgorithmConfig(num_rollout_samples=2, samples_per_prompt=2, normalize_advantages=False, **overrides)


def signal(estimator: str, **overrides: object):
    return estimate(
        SCORES, KL, None, MASK, config(advantage_estimator=estimator, **overrides), kl_coef=overrides.pop("coef", 1.0)
    )


def test_reinforce_sums_the_rewards_to_come():
    result = signal("reinforce")
    torch.testing.assert_close(result.rewards, torch.tensor([[0.0, -0.1, 0.7, 0], [-0.2, 0, 0.0, 2.6]]))
    torch.testing.assert_close(result.advantages, torch.tensor([[0.0, 0.6, 0.7, 0], [2.4, 0, 2.6, 2.6]]))
    assert result.returns is None


def test_groups_compare_scores_with_the_whole_responses_kl():
    # 1 - .4 = .6 against 3 - .6 = 2.4
    result = signal("rloo")
    torch.testing.assert_close(result.advantages, torch.tensor([[0.0, -1.8, -1.8, 0], [1.8, 0, 1.8, 1.8]]))


def test_with_kl_in_the_loss_rewards_are_scores_alone():
    result = signal("dr_grpo", kl_in="loss")
    torch.testing.assert_close(result.advantages, torch.tensor([[0.0, -1, -1, 0], [1, 0, 1, 1]]))


def test_a_sample_without_actions_is_no_part_of_its_group():
    mask = MASK.clone()
    mask[0] = 0
    algorithm = config(advantage_estimator="grpo", kl_in="loss")
    assert not estimate(SCORES, KL, None, mask, algorithm, kl_coef=1.0).advantages.any()


def test_a_small_kl_beside_a_large_score_still_tells_responses_apart():
    """Their difference is all that a group with equal scores has; fp32 sums of 42.1 and some 1e-6 would make other ones up."""
    kl = 1e-4 * torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    algorithm = AlgorithmConfig(
        advantage_estimator="grpo", samples_per_prompt=8, num_rollout_samples=8, normalize_advantages=False
    )
    result = estimate(torch.full((8,), 42.1), kl, None, torch.ones(8, 64), algorithm, kl_coef=0.01)
    penalties = -0.01 * kl.double().sum(-1)
    expected = (penalties - penalties.mean()) / (penalties.std() + algorithm.group_eps)
    torch.testing.assert_close(result.advantages[:, 0].double(), expected, rtol=1e-5, atol=1e-6)
    assert result.equal_groups == 1  # of scores, as the metric says


def test_a_sample_that_trains_nothing_is_compared_with():
    # As with rloo above, 2.4 - .6: the first sample's score and KL are the baseline of the second.
    learned = MASK * torch.tensor([[0.0], [1.0]])
    result = estimate(SCORES, KL, None, MASK, config(advantage_estimator="rloo"), kl_coef=1.0, learned=learned)
    torch.testing.assert_close(result.advantages, torch.tensor([[0.0, 0, 0, 0], [1.8, 0, 1.8, 1.8]]))
    torch.testing.assert_close(result.rewards, torch.tensor([[0.0, 0, 0, 0], [-0.2, 0, 0.0, 2.6]]))


def test_a_sample_that_trains_nothing_is_no_part_of_whitening():
    # 2.4, 2.6, 2.6: mean 7.6 / 3, squared deviations .16 / 9 and twice .04 / 9, their sum over 2 is .04 / 3
    learned = MASK * torch.tensor([[0.0], [1.0]])
    algorithm = config(advantage_estimator="reinforce")
    algorithm.normalize_advantages = True
    result = estimate(SCORES, KL, None, MASK, algorithm, kl_coef=1.0, learned=learned)
    low, high = -0.4 / 3 / math.sqrt(0.04 / 3), 0.2 / 3 / math.sqrt(0.04 / 3)
    expected = torch.tensor([[0.0, 0, 0, 0], [low, 0, high, high]])
    torch.testing.assert_close(result.advantages, expected, atol=1e-5, rtol=1e-5)


def test_advantages_may_be_centered_without_being_divided():
    # As above: the mean of 2.4, 2.6, 2.6 is 7.6 / 3.
    learned = MASK * torch.tensor([[0.0], [1.0]])
    algorithm = config(advantage_estimator="reinforce")
    algorithm.normalize_advantages, algorithm.advantage_std_norm = True, False
    result = estimate(SCORES, KL, None, MASK, algorithm, kl_coef=1.0, learned=learned)
    low, high = 2.4 - 7.6 / 3, 2.6 - 7.6 / 3
    torch.testing.assert_close(result.advantages, torch.tensor([[0.0, 0, 0, 0], [low, 0, high, high]]))


def test_the_critic_learns_nothing_from_a_sample_that_trains_nothing():
    learned = MASK * torch.tensor([[0.0], [1.0]])
    result = estimate(SCORES, KL, torch.zeros_like(KL), MASK, config(gae_lambda=1.0), kl_coef=1.0, learned=learned)
    torch.testing.assert_close(result.returns, torch.tensor([[0.0, 0, 0, 0], [2.4, 0, 2.6, 2.6]]))


def test_an_infinite_kl_that_is_no_part_of_the_reward_stays_out_of_it():
    endless = KL.clone()
    endless[0, 1] = math.inf
    algorithm = config(advantage_estimator="dr_grpo", kl_in="loss")
    result = estimate(SCORES, endless, None, MASK, algorithm, kl_coef=1.0)
    torch.testing.assert_close(result.advantages, torch.tensor([[0.0, -1, -1, 0], [1, 0, 1, 1]]))


def shape(scores, failed=(False, False), lengths=(4, 9), truncated=(False, False), limits=10, **overrides):
    return shape_scores(
        torch.tensor(scores), torch.tensor(failed), torch.tensor(lengths), torch.tensor(truncated), config(**overrides),
        max_length=torch.tensor(limits), normalizer=RunningNormalizer(),
    ).scores  # fmt: skip


def test_scores_are_normalised_then_clipped_then_charged():
    # mean 2, deviation sqrt(2): +-.7071, clipped at .5; 9 of 10 tokens with a buffer of 2: half of the factor 1; truncated: -1
    shaping = ShapingConfig(normalize="running", clip_low=-0.5, clip_high=0.5, overlong_buffer=2)
    result = shape([1.0, 3.0], truncated=(True, False), shaping=shaping, truncated_samples="penalise")
    torch.testing.assert_close(result, torch.tensor([-1.5, 0.0]))


def test_a_truncated_samples_score_is_replaced_last():
    # as above, but what normalising, clipping and length made of the first score is gone; the second is .5 - .5
    shaping = ShapingConfig(normalize="running", clip_low=-0.5, clip_high=0.5, overlong_buffer=7)
    settings = {"shaping": shaping, "truncated_samples": "replace", "truncation_penalty": -3.0}
    torch.testing.assert_close(
        shape([1.0, 3.0], truncated=(True, False), lengths=(10, 3), **settings), torch.tensor([-3.0, 0.5])
    )
    failed = shape([math.nan, 3.0], failed=(True, False), truncated=(True, True), **settings)
    torch.testing.assert_close(failed, torch.tensor([0.0, -3.0]))


def test_the_statistics_know_the_scores_that_are_replaced():
    normalizer = RunningNormalizer()
    algorithm = config(shaping=ShapingConfig(normalize="running"), truncated_samples="replace")
    scores, none, all_of_them = torch.tensor([1.0, 3.0]), torch.tensor([False, False]), torch.tensor([True, True])
    shape_scores(scores, none, torch.tensor([10, 10]), all_of_them, algorithm, max_length=10, normalizer=normalizer)
    assert (normalizer.count, normalizer.mean, normalizer.variance) == (2, 2.0, 2.0)


def test_n_plus_gives_a_truncated_response_minus_1_whatever_its_score():
    preset = OmegaConf.load(ROOT / "conf" / "algorithm" / "ppo_n_plus.yaml")
    algorithm = build(AlgorithmConfig, preset)
    result = shape_scores(
        torch.tensor([5.0, 5.0]), torch.tensor([False, False]), torch.tensor([9, 9]), torch.tensor([True, False]), algorithm,
        max_length=9, normalizer=RunningNormalizer(),
    ).scores  # fmt: skip
    assert result.tolist() == [-1.0, 5.0]


def test_a_responses_length_costs_by_its_own_limit():
    # 5 of 6 tokens, the last 4 of which cost: 3 / 4. 2 of 3 tokens, less than the buffer: 2 / 3.
    result = shape([1.0, 1.0], lengths=(5, 2), limits=(6, 3), shaping=ShapingConfig(overlong_buffer=4))
    torch.testing.assert_close(result, torch.tensor([0.25, 1 / 3]))


def test_failed_samples_stay_out_of_the_statistics():
    result = shape([math.nan, 3.0], failed=(True, False), shaping=ShapingConfig(normalize="running"))
    torch.testing.assert_close(result, torch.tensor([0.0, 0.0]))
