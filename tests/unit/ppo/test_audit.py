"""Health checks, which warn of a run that goes wrong, or stop it."""

import json
import logging
import math
from dataclasses import asdict

import pytest

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.ppo.health import Health, check_health
from nemo_style_rlhf.ppo.sampler_check import check_logprob_gap
from nemo_style_rlhf.ppo.session import Progress
from nemo_style_rlhf.schema.actor import AuditConfig, HealthConfig, PPOActorConfig

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
    check_logprob_gap(AuditConfig(max_logprob_gap=0.3, on_logprob_gap="stop"), METRICS)
    audited(AuditConfig(health=HealthConfig(min_entropy=0.9, max_init_policy_kl=0.4), on_unhealthy="stop"))
    assert not caplog.messages
    with caplog.at_level(logging.WARNING):
        check_logprob_gap(AuditConfig(max_logprob_gap=0.1), METRICS)
        audited(AuditConfig(health=HealthConfig(min_distinct_2=0.6)), step=7)
    gap, sign = caplog.messages
    assert gap.startswith("train_rollouts/sampler_logprob_gap_mean=0.2 is above audit.max_logprob_gap=0.1:")
    assert sign.startswith("step 7: train_rollouts/distinct_2=0.5 is below audit.health.min_distinct_2=0.6:")
    assert "look at the samples of step 7 " in sign and sign.endswith("Samples of this step:\n  one\n  two")
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
