"""Numbers of a PPO run that follow from its prompts; refuses prompts that do not fit. Needs no torch: see precheck/."""

from collections.abc import Sequence
from typing import Any

from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.agent import AgentConfig


def number_of_steps(config: PPOActorConfig, num_prompts: int) -> int:
    """Number of PPO steps. Raises UserError if the prompts are fewer than one rollout takes."""
    if config.algorithm.max_steps > 0:
        return config.algorithm.max_steps
    per_step = _prompts_per_step(config)
    steps = num_prompts * config.algorithm.max_epochs // per_step
    if steps == 0:
        raise UserError(
            f"{num_prompts} prompts are fewer than one rollout takes ({per_step}): set algorithm.max_steps, or a smaller "
            "algorithm.num_rollout_samples"
        )
    return steps


def prompts_to_take(config: PPOActorConfig, num_prompts: int) -> int | None:
    """Number of prompts that ``algorithm.max_epochs`` allows, if a filter takes more than the steps train; else None."""
    if config.algorithm.max_steps > 0 or not config.algorithm.filter.enabled:
        return None
    return num_prompts * config.algorithm.max_epochs


def prompts_needed(config: PPOActorConfig) -> int:
    """Lowest number of prompts that :func:`number_of_steps` accepts."""
    return 1 if config.algorithm.max_steps > 0 else -(-_prompts_per_step(config) // config.algorithm.max_epochs)


def _prompts_per_step(config: PPOActorConfig) -> int:
    return config.algorithm.num_rollout_samples // config.algorithm.samples_per_prompt


def max_sequence_length(config: PPOActorConfig, prompts: Sequence[Prompt], hf_config: Any) -> int:
    """Length in tokens of the longest prompt with a full response, or of the longest episode.

    Raises:
        UserError: the policy, whose config is ``hf_config``, has fewer positions.
    """
    longest = max(len(prompt.token_ids) for prompt in prompts)
    needed = longest + config.generation.max_length
    limit = getattr(hf_config.get_text_config(), "max_position_embeddings", None)  # ALiBi models have none
    if config.agent.in_use:
        return longest_episode(config.agent, longest, limit, config.model.path)
    if limit is not None and needed > limit:
        raise UserError(
            f"a prompt of {longest} tokens and generation.max_length={config.generation.max_length} make {needed}, more than the "
            f"{limit} positions of {config.model.path}: lower data.max_prompt_length or generation.max_length"
        )
    return needed


def longest_episode(agent: AgentConfig, longest_prompt: int, positions: int | None, path: str) -> int:
    """Limit on the tokens of an episode.

    Args:
        positions: of the model in ``path``; None without a limit.

    Raises:
        UserError: the model has fewer positions, or a prompt leaves no room.
    """
    limit = agent.max_tokens or positions
    if limit is None:
        raise UserError(f"{path} has no limit on positions: set agent.max_tokens to the longest episode in tokens")
    if positions is not None and limit > positions:
        raise UserError(f"agent.max_tokens={limit} is more than the {positions} positions of {path}: lower it")
    if longest_prompt >= limit:
        raise UserError(
            f"a prompt of {longest_prompt} tokens leaves no room in episodes of at most {limit}: lower data.max_prompt_length, "
            "or raise agent.max_tokens"
        )
    return limit
