"""Meets the critic server when a run starts. recovery.py handles a later loss of it."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from nemo_style_rlhf.critic_service.remote_critic import RemoteCritic
from nemo_style_rlhf.data.template_files import check_reward_template
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch.starting import starting
from nemo_style_rlhf.models.digests import tokenizer_digest
from nemo_style_rlhf.ppo.policy import LoadedPolicy
from nemo_style_rlhf.ppo.recovery import wait_together
from nemo_style_rlhf.ppo.start import RunStart
from nemo_style_rlhf.schema.actor import PPOActorConfig

log = logging.getLogger(__name__)


class Closable(Protocol):
    def close(self) -> None: ...


def contact_critic(
    start: RunStart, policy: LoadedPolicy, ranks: Ranks
) -> tuple[RemoteCritic | None, RemoteCritic | None]:
    """Connect to the critic server, and meet it if it answers. Every rank calls this.

    Returns:
        The critic, None if the run needs none; and the critic again if it does not answer yet, for :func:`meet_critic_last`.
    """
    if not start.config.uses_critic_process:
        return None, None
    critic = RemoteCritic(start.config.remote_critic_rm)
    if _still_loads(critic, start.config, ranks):
        return critic, critic
    _meet(critic, start, policy, ranks)
    return critic, None


def meet_critic_last(
    critic: RemoteCritic, start: RunStart, policy: LoadedPolicy, ranks: Ranks, loaded: Sequence[Closable | None]
) -> None:
    """Meet the critic after everything else is ``loaded``; close that if the server does not fit. Every rank calls this.

    Raises:
        UserError: the server does not fit, or does not answer in time.
    """
    starting("waiting for the critic server")
    try:
        _meet(critic, start, policy, ranks)
    except BaseException:
        for part in loaded:
            if part is not None:
                part.close()
        raise


def _still_loads(critic: RemoteCritic, config: PPOActorConfig, ranks: Ranks) -> bool:
    # A server that shares the devices must leave them before the other parts load.
    patient = not config.placement.in_turns and config.remote_critic_rm.wait_for_server_s > 0
    if not patient or all(ranks.everyone(critic.answers)):
        return False
    log.info("%s does not answer yet: the policy and its generator load meanwhile", critic.where)
    if config.agent.in_use and not config.algorithm.uses_critic:
        log.warning(
            "the run waits for a reward model beside the environment's own rewards: if these are all, give reward=environment"
        )
    return True


def _meet(critic: RemoteCritic, start: RunStart, policy: LoadedPolicy, ranks: Ranks) -> None:
    """Wait for the critic server, and check that it fits."""
    config = start.config
    status = wait_together(ranks, start.store, partial(critic.wait_until_ready, log.info))
    needs_rewards = config.reward.critic.weight != 0
    if needs_rewards:
        check_reward_template(
            f"the reward model of the critic server at {critic.address}", status.templates, config.data
        )
    status = critic.handshake(
        tokenizer_digest=tokenizer_digest(start.tokenizer),
        vocab_size=policy.vocabulary,
        needs_rewards=needs_rewards,
        needs_critic=config.algorithm.uses_critic,
        needs_bits=bool(config.run.deterministic),
    )
    if "critic" in status.roles and not config.algorithm.uses_critic and ranks.is_first:
        log.warning(
            "%s holds a critic, which algorithm.advantage_estimator=%s does not use: start it with "
            "value_model.enabled=false, and it needs only the reward model's memory",
            critic.where, config.algorithm.advantage_estimator,
        )  # fmt: skip
    if status.max_length < policy.max_length:
        raise UserError(
            f"sequences may reach {policy.max_length} tokens but the critic server takes at most {status.max_length}: lower "
            "data.max_prompt_length or generation.max_length, or serve a reward model with more positions"
        )
