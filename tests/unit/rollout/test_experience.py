"""From samples to experience: masks, penalties and what is refused."""

from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.ppo.metrics import rollout_metrics
from nemo_style_rlhf.rollout.experience import ShapingState
from nemo_style_rlhf.schema.algorithm import AlgorithmConfig, FilterConfig, ShapingConfig
from nemo_style_rlhf.schema.base import validate
from nemo_style_rlhf.schema.generation import SamplingOverrides
from tests.support.rollouts import PROMPTS, LengthScorer, UnluckyScorer, collect, make_collector


class TrainedBetween(LengthScorer):
    """Its critic is trained after the first group."""

    def __init__(self):
        self.groups = 0

    def score(self, samples):
        scores = super().score(samples).result()
        scores.critic_steps, self.groups = frozenset({min(self.groups, 1)}), self.groups + 1
        future = Future()
        future.set_result(scores)
        return future


@pytest.mark.parametrize(("target", "resumed"), [(0.0, 0.1), (0.05, 0.02)])
def test_a_resumed_run_takes_the_kl_coefficient_from_its_checkpoint_only_where_it_is_steered(target, resumed):
    collector = make_collector(initial_policy_kl_penalty=0.1, kl_target=target)
    collector.builder.state = ShapingState(0.02, {})
    assert collector.kl_coef == resumed


def test_the_kl_coefficient_waits_for_the_policy_to_learn():
    collector = make_collector(initial_policy_kl_penalty=0.1, kl_target=0.05, kl_horizon=400, critic_warmup_steps=2)
    coefs = []
    for step in (1, 2, 3):
        collector.collect(lambda count: PROMPTS[:count], step=step)
        coefs.append(collector.kl_coef)
    assert coefs == [0.1, 0.1, pytest.approx(0.1 * (1 - 0.2 * 40 / 400))]  # KL is 0: an error of -1, clipped at -.2


def test_the_least_kl_multiplier_is_the_configurations():
    collector = make_collector(initial_policy_kl_penalty=0.1, kl_target=0.05, kl_horizon=4, kl_min_multiplier=0.75)
    collector.collect(lambda count: PROMPTS[:count], step=1)
    assert collector.kl_coef == pytest.approx(0.075)


@pytest.mark.parametrize("multiplier", [0.0, -0.5, 1.5, float("nan")])
def test_a_kl_multiplier_that_could_turn_the_penalty_around_is_refused(multiplier):
    with pytest.raises(UserError, match=r"algorithm\.kl_min_multiplier=.* is not possible: expected a number above 0"):
        validate(AlgorithmConfig(kl_min_multiplier=multiplier), "algorithm.")


def test_an_experience_lists_samples_in_the_order_of_their_requests():
    experience = collect()
    expected = [(prompt.prompt_id, index) for prompt in PROMPTS for index in range(10)]
    assert [(sample.sample.prompt_id, sample.sample.index) for sample in experience.rollouts] == expected
    assert [sample.prompt.label for sample in experience.rollouts[::10]] == ["0", "1", "2", "3"]
    assert experience.scores.rewards.tolist() == [float(length) for length in experience.lengths]
    assert torch.equal(experience.kl, torch.zeros_like(experience.kl))
    gap = (experience.logprobs - experience.sampler_logprobs)[experience.mask.bool()].abs().max()
    assert gap < 1e-5
    counted = experience.mask.bool()
    assert experience.advantages[counted].mean().abs() < 1e-5
    assert experience.advantages[counted].std() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("settings", [{}, {"filter": FilterConfig(low=-1.0, high=100.0)}])
def test_values_of_one_rollout_that_two_critic_steps_gave_are_refused(settings):
    """40 samples are two scoring requests."""
    with pytest.raises(
        UserError, match="values of one rollout are from its steps 0, 1: another run trains or restores"
    ):
        collect(scorer=TrainedBetween(), **settings)
    assert collect(scorer=TrainedBetween(), advantage_estimator="grpo", **settings).returns is None


def test_without_whitening_returns_are_the_scores_where_gamma_and_lambda_are_one():
    experience = collect(normalize_advantages=False, gae_lambda=1.0)
    parts = zip(
        experience.returns.split(experience.lengths),
        experience.mask.split(experience.lengths),
        experience.scores.rewards,
    )
    for returns, mask, score in parts:
        torch.testing.assert_close(returns[mask.bool()], score.expand(int(mask.sum())))


def test_truncated_samples_are_kept_masked_or_penalised():
    kept, masked = collect(), collect(truncated_samples="mask")
    penalised = collect(
        truncated_samples="penalise", truncation_penalty=-3.0, normalize_advantages=False, gae_lambda=1.0
    )
    truncated = torch.tensor([sample.truncated for sample in kept.rollouts])
    assert 0 < int(truncated.sum()) < 40
    for keep, mask, cut in zip(kept.mask.split(kept.lengths), masked.mask.split(masked.lengths), truncated):
        assert torch.equal(mask, keep * float(not cut))
    returns = torch.stack([part[mask.bool()][0] for part, mask in zip(
        penalised.returns.split(penalised.lengths), penalised.mask.split(penalised.lengths))])  # fmt: skip
    torch.testing.assert_close(returns, penalised.scores.rewards - 3.0 * truncated)
    replaced = collect(truncated_samples="replace", truncation_penalty=-3.0, normalize_advantages=False, gae_lambda=1.0)
    returns = torch.stack([part[mask.bool()][0] for part, mask in zip(
        replaced.returns.split(replaced.lengths), replaced.mask.split(replaced.lengths))])  # fmt: skip
    torch.testing.assert_close(returns, replaced.scores.rewards.masked_fill(truncated, -3.0))
    assert rollout_metrics(kept)["train_rollouts/truncated_fraction"] == pytest.approx(float(truncated.float().mean()))


class FarReference:
    """Finds every token certain: the KL estimate k1 is each token's log-probability."""

    def logprobs(self, tokens, lengths, mask, temperatures):
        return torch.zeros_like(mask)


@pytest.mark.parametrize("estimator", ["rloo", "grpo", "reinforce_baseline", "reinforce", "gae"])
def test_masked_samples_stay_in_the_baseline_with_their_kl(estimator):
    """Nothing changes for the samples that are learned from, but for whitening."""

    def experience(truncated_samples):
        collector = make_collector(
            truncated_samples=truncated_samples, advantage_estimator=estimator, normalize_advantages=False
        )
        collector.builder.reference = FarReference()
        return collector.collect(lambda count: PROMPTS[:count], step=1)

    kept, masked = experience("keep"), experience("mask")
    learned = masked.mask.bool()
    assert 0 < learned.sum() < kept.mask.sum()
    for name in ("rewards", "advantages", "logprobs", "kl"):
        torch.testing.assert_close(getattr(masked, name)[learned], getattr(kept, name)[learned])
    assert not masked.advantages[~learned].any() and not masked.rewards[~learned].any()
    if estimator == "gae":
        torch.testing.assert_close(masked.returns, kept.returns * learned)


def test_a_failed_sample_is_no_part_of_its_group_even_where_it_was_truncated():
    settings = {"advantage_estimator": "dr_grpo", "normalize_advantages": False, "truncated_samples": "mask"}
    experience = collect(scorer=UnluckyScorer(), **settings)
    groups = experience.scores.rewards.view(4, 10)  # NaN where the sample failed
    expected = (groups - groups.nanmean(-1, keepdim=True)).flatten()
    for part, mask, advantage in zip(
        experience.advantages.split(experience.lengths), experience.mask.split(experience.lengths), expected
    ):
        torch.testing.assert_close(part[mask.bool()], advantage.expand(int(mask.sum())))


def test_a_prompts_own_max_length_is_what_its_responses_are_charged_against():
    own = [replace(prompt, sampling=SamplingOverrides(max_length=3)) for prompt in PROMPTS[:2]]
    shaping = ShapingConfig(overlong_buffer=4)
    collector = make_collector(shaping=shaping, normalize_advantages=False, gae_lambda=1.0, truncated_samples="keep")
    experience = collector.collect(lambda count: [*own, *PROMPTS[2:count]], step=1)
    for sample, score, returns, mask in zip(
        experience.rollouts, experience.scores.rewards, experience.returns.split(experience.lengths),
        experience.mask.split(experience.lengths),
    ):  # fmt: skip
        length = sample.response_length
        # of 6 tokens the last 4 cost; of 3 tokens all do
        charge = length / 3 if sample.sample.prompt_id < 2 else max(0, length - 2) / 4
        assert float(returns[mask.bool()][0]) == pytest.approx(float(score) - charge)
    assert any(sample.truncated for sample in experience.rollouts[:20])


def test_a_sample_without_a_score_trains_nothing_and_is_counted():
    experience = collect(scorer=UnluckyScorer())
    failed = experience.scores.failures.nonzero().squeeze(1).tolist()
    assert failed == [0, 20]  # two groups
    masks = experience.mask.split(experience.lengths)
    assert [index for index, mask in enumerate(masks) if not mask.any()] == failed
    assert all(torch.isfinite(part).all() for part in (experience.rewards, experience.advantages, experience.returns))
    metrics = rollout_metrics(experience)
    assert metrics["train_rollouts/reward_failures"] == 2
    assert metrics["train_rollouts/rewards"] == pytest.approx(float(experience.scores.rewards.nanmean()))


class BrokenCritic(LengthScorer):
    """Has no number for the value of one action in each group, and for all states after the last action."""

    def __init__(self, at):
        self.at = at

    def score(self, samples):
        scores = super().score(samples).result()
        ends = torch.tensor([len(sample.tokens) for sample in samples]).cumsum(0) - 1
        scores.values[ends] = torch.nan
        scores.values[int(ends[3]) + self.at] = torch.inf
        future = Future()
        future.set_result(scores)
        return future


def test_values_that_are_not_finite_stop_the_run_in_one_sentence():
    with pytest.raises(
        UserError, match=r"^the critic's values of 2 of 40 samples are not finite \(the first is inf\): "
    ):
        collect(scorer=BrokenCritic(at=-1))
    assert collect(scorer=BrokenCritic(at=0)).advantages.isfinite().all()  # no action's value
    assert collect(scorer=BrokenCritic(at=-1), advantage_estimator="rloo").advantages.isfinite().all()  # asks for none
