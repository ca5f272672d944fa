"""From scores to advantages, audits and validation numbers, with numbers derived by hand."""

import json
import logging
import math
from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from nemo_style_rlhf.algorithms.reward_shaping import RunningNormalizer
from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, SampleId
from nemo_style_rlhf.ppo.audit import Health, audit_gap, check_health
from nemo_style_rlhf.ppo.metrics import excerpts, ngram_metrics, validation_metrics
from nemo_style_rlhf.ppo.session import Progress
from nemo_style_rlhf.rollout.signal import estimate, shape_scores
from nemo_style_rlhf.rollout.types import Rollout, Sampled
from nemo_style_rlhf.schema.actor import AuditConfig, HealthConfig, PPOActorConfig
from nemo_style_rlhf.schema.algorithm import AlgorithmConfig, ShapingConfig
from nemo_style_rlhf.schema.base import build
from nemo_style_rlhf.scoring.interface import Scores
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
    assert result.equal_groups == 0


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
    )  # fmt: skip


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
    )  # fmt: skip
    assert result.tolist() == [-1.0, 5.0]


def test_a_responses_length_costs_by_its_own_limit():
    # 5 of 6 tokens, the last 4 of which cost: 3 / 4. 2 of 3 tokens, less than the buffer: 2 / 3.
    result = shape([1.0, 1.0], lengths=(5, 2), limits=(6, 3), shaping=ShapingConfig(overlong_buffer=4))
    torch.testing.assert_close(result, torch.tensor([0.25, 1 / 3]))


def test_failed_samples_stay_out_of_the_statistics():
    result = shape([math.nan, 3.0], failed=(True, False), shaping=ShapingConfig(normalize="running"))
    torch.testing.assert_close(result, torch.tensor([0.0, 0.0]))


def rollout(prompt: int, index: int, tokens: list[int]) -> Rollout:
    request = GenerationRequest(SampleId(0, prompt, index), (1,), 0, 9)
    return Rollout.from_completion(
        Completion(request, tokens, torch.zeros(len(tokens)), "stop", 0), Prompt(0, list(request.prompt), "")
    )


def test_validation_counts_passes_per_sample_and_per_prompt():
    rollouts = [rollout(prompt, index, [2, 3]) for prompt in range(2) for index in range(2)]
    sampled = Sampled(rollouts, Scores(rewards=torch.tensor([1.0, 0.0, 0.2, 0.4])))
    metrics = validation_metrics(sampled, pass_score=1.0)
    assert (metrics["val_rollouts/pass@1"], metrics["val_rollouts/pass@2"]) == (0.25, 0.5)
    assert metrics["val_rollouts/rewards"] == pytest.approx(0.4)
    assert not any("pass@" in name for name in validation_metrics(sampled, pass_score=None))


@pytest.mark.parametrize("score", [0.1, 0.3, 0.7, 0.9])
def test_a_score_that_equals_the_pass_score_passes(score):
    # In fp32 .7 is .69999999 and .9 is .89999998: below what the configuration says.
    scores = torch.tensor([score, score - 1e-6, math.nan])
    sampled = Sampled([rollout(prompt, 0, [2, 3]) for prompt in range(3)], Scores(rewards=scores))
    assert validation_metrics(sampled, pass_score=score)["val_rollouts/pass@1"] == pytest.approx(1 / 3)


def test_repetition_is_the_share_of_4_grams_seen_before():
    def repetition(*responses: list[int]) -> float:
        return ngram_metrics([np.array(response) for response in responses])["repetition"]

    assert repetition([1, 2, 3]) == 0
    assert repetition([1, 2, 3, 4, 5]) == 0
    assert repetition([1] * 7) == 0.75  # four 4-grams, three of them repeated
    assert repetition([1] * 7, [1] * 7, [2, 3]) == 0.5  # each response by itself


def test_ngrams_are_counted_as_sets_count_them():
    draw = np.random.default_rng(0)
    for vocabulary in (2, 7, 100, 150_000):
        responses = [draw.integers(0, vocabulary, draw.integers(1, 60)) for _ in range(40)]
        bigrams = [pair for response in responses for pair in pairwise(response.tolist())]
        shares = []
        for response in responses:
            ngrams = [tuple(response[start : start + 4].tolist()) for start in range(len(response) - 3)]
            shares.append(1 - len(set(ngrams)) / len(ngrams) if ngrams else 0)
        found = ngram_metrics(responses)
        assert found["distinct_2"] == len(set(bigrams)) / len(bigrams)
        assert found["repetition"] == pytest.approx(sum(shares) / len(shares))


METRICS = {
    "train_rollouts/sampler_logprob_gap_mean": 0.2, "train_rollouts/response_lengths": 50, "train_rollouts/repetition": 0.1,
    "train_rollouts/distinct_2": 0.5, "train_rollouts/entropy": 1.0, "train_rollouts/init_policy_kl": 0.3,
}  # fmt: skip


UNTOUCHED = Health()


def audited(
    config: AuditConfig, health: Health = UNTOUCHED, *, step: int = 1, bigrams: int = 1000, **changed: float
) -> Health:
    """After a rollout with METRICS, but for those ``changed``."""
    metrics = METRICS | {f"train_rollouts/{name}": value for name, value in changed.items()}
    return check_health(config, metrics, health, step=step, bigrams=bigrams, samples=lambda: ["one", "two"])


def test_audits_warn_or_stop_beyond_their_limits(caplog):
    audit_gap(AuditConfig(max_logprob_gap=0.3, on_logprob_gap="stop"), METRICS)
    audited(AuditConfig(health=HealthConfig(min_entropy=0.9, max_init_policy_kl=0.4), on_unhealthy="stop"))
    assert not caplog.messages
    with caplog.at_level(logging.WARNING):
        audit_gap(AuditConfig(max_logprob_gap=0.1), METRICS)
        audited(AuditConfig(health=HealthConfig(min_distinct_2=0.6)), step=7)
    gap, sign = caplog.messages
    assert gap.startswith("train_rollouts/sampler_logprob_gap_mean=0.2 is above audit.max_logprob_gap=0.1:")
    assert sign.startswith("step 7: train_rollouts/distinct_2=0.5 is below audit.health.min_distinct_2=0.6:")
    assert "rollouts/step_000007.jsonl" in sign and sign.endswith("Samples of this step:\n  one\n  two")
    with pytest.raises(
        UserError, match=r"response_lengths=50 is above audit\.health\.max_response_lengths=40; the run stops"
    ):
        audited(AuditConfig(health=HealthConfig(max_response_lengths=40), on_unhealthy="stop"))


def failed_checks(health: Health, caplog: pytest.LogCaptureFixture, **rollout: float) -> list[str]:
    """The metrics that a default configuration warns of."""
    caplog.clear()
    return list(audited(AuditConfig(), health, **rollout).warned)  # type: ignore[arg-type]


def test_runaway_kl_fails_a_check_by_default_where_a_reference_measures_it(caplog):
    assert failed_checks(Health(), caplog, init_policy_kl=0.99) == []
    assert failed_checks(Health(), caplog, init_policy_kl=8.7) == ["init_policy_kl"]
    assert "init_policy_kl=8.7 is above audit.health.runaway_kl=1 nats per token: look at" in caplog.text
    assert "raise algorithm.initial_policy_kl_penalty or lower engine.optim.lr" in caplog.text
    assert failed_checks(Health(), caplog, init_policy_kl=math.nan) == ["init_policy_kl"]
    explicit = AuditConfig(health=HealthConfig(max_init_policy_kl=9.0), on_unhealthy="stop")
    audited(explicit, init_policy_kl=8.7)
    without = {name: value for name, value in METRICS.items() if "kl" not in name}
    assert (
        check_health(AuditConfig(on_unhealthy="stop"), without, Health(), step=1, bigrams=1000, samples=list).warned
        == {}
    )


def test_no_reference_is_loaded_for_a_default_limit():
    config = PPOActorConfig()
    config.algorithm.initial_policy_kl_penalty = 0.0
    assert not config.needs_reference
    config.audit.health.max_init_policy_kl = 0.5
    assert config.needs_reference


@pytest.mark.parametrize(
    ("first", "bigrams", "distinct_2", "sign"),
    [
        (1000, 1000, 0.31, False),
        (1000, 1000, 0.29, True),  # half of the 0.6 it began with is 0.3
        (1000, 4000, 0.16, False),  # 640 different bigrams, more than the first 600: a longer text repeats itself
        (1000, 4000, 0.074, True),  # 296 are fewer than 300, half of the first
        (1000, 300, 0.29, True),  # shorter: the share alone counts
        (1000, 255, 0.01, False),  # too few to tell
        (255, 1000, 0.01, False),  # nothing to compare with
    ],
)
def test_distinct_2_is_compared_with_the_first_rollout(first, bigrams, distinct_2, sign, caplog):
    health = audited(AuditConfig(), distinct_2=0.6, bigrams=first)
    found = failed_checks(health, caplog, distinct_2=distinct_2, bigrams=bigrams, step=2)
    assert found == (["distinct_2"] if sign else [])
    if sign:
        assert f"distinct_2={distinct_2:.4g} is below audit.health.min_distinct_2_share=0.5 of the 0.6" in caplog.text


def test_a_small_first_rollout_leaves_the_comparison_to_a_later_one():
    health = audited(AuditConfig(), distinct_2=0.9, bigrams=10)
    health = audited(AuditConfig(), health, distinct_2=0.6, bigrams=256)
    health = audited(AuditConfig(), health, distinct_2=0.8, bigrams=5000)
    assert (health.distinct_2, health.bigrams) == (0.6, 256)


def test_a_sign_that_lasts_is_repeated_every_ten_steps_also_over_a_resume(caplog):
    def steps(health: Health, numbers: range) -> Health:
        for step in numbers:
            health = audited(AuditConfig(), health, step=step, init_policy_kl=0.5 if step in (5, 6) else 3.0)
        return health

    steps(Health(), range(1, 25))
    whole = [message.split(":")[0] for message in caplog.messages]
    assert whole == ["step 1", "step 11", "step 21"]
    caplog.clear()
    saved = json.loads(json.dumps(asdict(steps(Health(), range(1, 8)))))
    steps(Health(**saved), range(8, 25))
    assert [message.split(":")[0] for message in caplog.messages] == whole


def test_a_run_that_a_sign_stopped_is_stopped_again_after_a_resume():
    health = Health(distinct_2=0.6, bigrams=1000, warned={"distinct_2": 3})
    with pytest.raises(UserError, match=r"distinct_2=0\.1 is below .*; the run stops"):
        audited(AuditConfig(on_unhealthy="stop"), Health(**asdict(health)), step=4, distinct_2=0.1)


def test_checkpoints_from_before_the_health_checks_load():
    assert Progress(**{"step": 3, "data_position": 6, "critic_step": 3, "collector": {}}).health == {}
    assert Health(**Progress().health) == Health()


def test_samples_in_a_warning_are_lines_that_a_terminal_survives():
    def lines_of(*samples: tuple[str, float]) -> list[str]:
        return excerpts([reward for _, reward in samples], lambda row: ("say\nit", samples[row][0]))

    lines = lines_of(("dull", 0.5), ("\x1b[2J\r\u202eu" + "u" * 500, 9.97), ("?", math.nan), ("good", 3.0))
    assert lines[0].startswith(r"reward 9.97: 'say\nit' -> '\x1b[2J\r\u202euuuuu") and lines[0].endswith("uuu...")
    assert lines[1] == r"reward 0.5: 'say\nit' -> 'dull'"
    assert all(line.isprintable() and len(line) < 140 for line in lines) and len(lines) == 2
    assert lines_of(("alone", 1.0)) == [r"reward 1: 'say\nit' -> 'alone'"]
    assert lines_of(("?", math.nan)) == []
