"""The seconds that a dry run reports."""

import pytest

from nemo_style_rlhf.ppo.run import rehearsed
from nemo_style_rlhf.schema.actor import PPOActorConfig


@pytest.mark.parametrize(
    ("sampled", "engines"), [({"generate": 4.0}, 0), ({"beside_sampling": 4.0, "wait_for_rollout": 3.0}, 2)]
)
def test_a_rollout_lasts_until_its_rewards_are_there_and_validation_is_no_training(sampled, engines):
    """With engines, which began 1 s before the step, or without: 4 s, 2 s for rewards, 9 s for training, 5 s for validation."""
    config = PPOActorConfig()
    config.generation.engines.count = engines
    laps = {"wait_for_scores": 2.0, "logprobs": 3.0, "actor_update": 6.0, "validation": 5.0}
    step = sum(laps.values()) + sampled.get("generate", sampled.get("wait_for_rollout"))
    metrics = {f"timers/{name}": seconds for name, seconds in (laps | sampled | {"step": step}).items()}
    said = rehearsed(metrics, config)
    assert said.startswith("The rollout took 6 s and training 9 s, for 512 samples of at most 512 tokens")
    assert "Here training is the longer part: a step lasts 15 s" in said
