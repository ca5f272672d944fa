"""Checks of each program before it imports torch, vLLM or DeepSpeed, or starts another program.

The sentences come from the code that loads everything and checks again. Here it sees only the first rows of a file, and a
model's config.json. Checks without a tokenizer come first, since the libraries that come with one cost the most.
"""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch.program import CRITIC
from nemo_style_rlhf.precheck import ppo, supervised
from nemo_style_rlhf.precheck.models import (
    check_compared,
    check_critic_server,
    check_policy,
    check_reward_model,
    check_start,
    check_trained,
)
from nemo_style_rlhf.precheck.process import is_due, without_torch
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.critic import PPOCriticConfig
from nemo_style_rlhf.schema.evaluation import EvaluationConfig
from nemo_style_rlhf.schema.inspection import InspectDataConfig
from nemo_style_rlhf.schema.pair import LaunchedConfig
from nemo_style_rlhf.schema.reward_server import RewardServerProcessConfig
from nemo_style_rlhf.schema.supervised import RewardModelConfig, SupervisedConfig

Config = TypeVar("Config")


def _once(check: Callable[[Config], None]) -> Callable[[Config], None]:
    """Run the check in one process of a run. It raises a :class:`UserError` if the run would be refused."""

    @wraps(check)
    def checking(config: Config) -> None:
        if is_due():
            check(config)

    return checking


@_once
def check_actor(config: PPOActorConfig) -> None:
    check_policy(config)
    ppo.check_prompts(config)
    without_torch(ppo.check_tokens, config, then_torch=True)


@_once
def check_critic(config: PPOCriticConfig) -> None:
    check_critic_server(config)


@_once
def check_launched(config: LaunchedConfig) -> None:
    if config.uses_critic_process:
        try:
            check_critic_server(config.critic_server)
        except UserError as error:
            raise UserError(f"{CRITIC}: {error}") from error
    check_policy(config)
    ppo.check_prompts(config)
    without_torch(ppo.check_tokens, config)


@_once
def check_reward_server(config: RewardServerProcessConfig) -> None:
    check_reward_model(config.model.path, config.reward.label_weights)


@_once
def check_stage(config: SupervisedConfig) -> None:
    if isinstance(config, RewardModelConfig):
        check_start(config.model.path)
    elif config.model.init == "pretrained":
        check_trained(config.model.path)
    supervised.check_rows(config.data)  # type: ignore[attr-defined]
    without_torch(supervised.check_tokens, config, then_torch=True)


@_once
def check_evaluation(config: EvaluationConfig) -> None:
    reward = config.reward.model
    if reward.path and reward.weight != 0:
        check_reward_model(reward.path, reward.label_weights)
    for checkpoint in config.parsed_checkpoints:
        check_compared(checkpoint.path, config.generation)
    ppo.check_evaluation_prompts(config)
    without_torch(ppo.check_evaluation_tokens, config, then_torch=True)


@_once
def check_inspection(config: InspectDataConfig) -> None:
    supervised.check_rows(config.stage_data)
