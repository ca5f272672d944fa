"""Plans the critic server's memory."""

from collections import Counter

from nemo_style_rlhf.data.ragged import padded_rows
from nemo_style_rlhf.planning.blueprint import Blueprint, PlannedBatch
from nemo_style_rlhf.planning.device import Device
from nemo_style_rlhf.planning.phases import CRITIC, Phase, ProcessPlan
from nemo_style_rlhf.planning.training_memory import frozen_weights, trained_model, training_phases
from nemo_style_rlhf.rollout.producer import SCORING_GROUP
from nemo_style_rlhf.schema.plan import PlanConfig


def plan_critic(
    config: PlanConfig, critic: Blueprint, reward: Blueprint, device: Device, *, prompt_length: int
) -> ProcessPlan:
    """Plan the critic server, for prompts of at most ``prompt_length`` tokens.

    Args:
        critic: the critic, or without one the reward model.
        reward: the reward model; it counts if the server serves it.
    """
    server, ranks, algorithm = config.critic_server, config.critic_ranks, config.algorithm
    length = prompt_length + config.generation.max_length
    libraries = device.libraries("critic")
    held = Counter({"libraries": libraries})
    if server.value_model.enabled:
        held = trained_model(critic, server.engine, device, ranks=ranks, libraries=libraries)
    samples = algorithm.num_rollout_samples  # micro-batches are formed as for one rank, then shared
    batch = _batch(config, min(samples, SCORING_GROUP), length)
    scoring = critic.inference(batch)
    if server.reward_model.combine_rm_and_critic_server:
        scoring = max(scoring, reward.inference(batch), key=Counter.total)  # one after the other
        # A reward model that has slept stays off the device while the critic trains, unless it is sharded.
        rests = server.reward_model.offload_reward_model or (config.placement.in_turns and server.engine.zero_stage < 3)
        if rests and device.cuda:
            scoring["reward model"] = reward.base_weights
        else:
            held["reward model"] = frozen_weights(reward, server.engine, ranks=ranks)
    if not server.value_model.enabled:
        return ProcessPlan(CRITIC, (Phase("rewards", held + scoring),), ranks)
    phases = training_phases(
        critic, server.engine, device, held, {"values and rewards": scoring},
        critic.training(_batch(config, -(-samples // algorithm.mini_batches), length)), ranks=ranks,
    )  # fmt: skip
    return ProcessPlan(CRITIC, tuple(phases), ranks)


def _batch(config: PlanConfig, samples: int, length: int) -> PlannedBatch:
    """The micro-batch of ``Batches`` if all sequences are as long as the longest."""
    engine = config.critic.engine
    rows = max(1, min(samples, engine.micro_batch_tokens // length))
    if not config.critic.model.packing:
        rows = padded_rows(rows, length, multiple=engine.row_multiple or 8, token_budget=engine.micro_batch_tokens)
    return PlannedBatch(rows=rows, length=length, actions=0)
