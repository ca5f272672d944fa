"""Checks models by their config.json and the names of their weights, without torch and transformers. Hub names and pickled
weights are checked when they are loaded."""

from collections.abc import Sequence

from nemo_style_rlhf.models.heads import StoredHead, is_pickled, stored_head
from nemo_style_rlhf.models.kinds import (
    ConfigFile,
    fitting_weights,
    is_pooled,
    refuse_encoder,
    require_decoder,
    require_full_weights,
    require_reward_head,
    require_weights_of_labels,
)
from nemo_style_rlhf.ppo.limits import longest_episode
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.critic import PPOCriticConfig
from nemo_style_rlhf.schema.generation import GenerationConfig


def check_trained(path: str) -> None:
    """Raise UserError if the weights in ``path`` cannot be trained."""
    if config := ConfigFile.read(path):
        require_full_weights(path, config)


def check_policy(config: PPOActorConfig) -> None:
    """Raise UserError if the policy's weights cannot be trained, or its positions leave no room for a prompt and a response."""
    check_trained(path := config.model.path)
    if (limit := _positions(path)) is None:
        return
    if config.agent.in_use:
        longest_episode(config.agent, 0, limit, path)
    else:
        config.generation.require_room(limit, f"positions of {path}")


def check_compared(path: str, generation: GenerationConfig) -> None:
    """Raise UserError if the positions of an evaluation's checkpoint leave no room for a prompt and a response."""
    if (limit := _positions(path)) is not None:
        generation.require_room(limit, f"positions of {path}")


def _positions(path: str) -> int | None:
    """Number of positions, if config.json names it."""
    config = ConfigFile.read(path)
    return None if config is None else config.get_text_config().max_position_embeddings


def check_reward_model(path: str, label_weights: Sequence[float] | None, *, per_token: bool = False) -> None:
    """Raise UserError if it is not a reward model, or has several labels that ``label_weights`` does not fit.

    Args:
        per_token: refuse encoders.
    """
    if (known := _config_and_head(path)) is None:
        return
    config, head = known
    require_reward_head(path, config, head)
    require_full_weights(path, config)
    if is_pooled(config, head):
        require_weights_of_labels(path, config.num_labels, label_weights)
        if per_token:
            refuse_encoder(path, config.architectures[0])
    elif head is not None:
        require_weights_of_labels(path, head.labels, label_weights)


def check_start(path: str, label_weights: Sequence[float] | None = None) -> None:
    """Raise UserError if neither a critic nor a reward model's training can start from ``path``."""
    if (known := _config_and_head(path)) is None:
        return
    config, head = known
    require_full_weights(path, config)
    if head is not None:
        require_weights_of_labels(path, head.labels, fitting_weights(head, label_weights))


def check_critic_server(config: PPOCriticConfig) -> None:
    """Raise UserError if one of the server's models does not fit."""
    if config.reward_model.combine_rm_and_critic_server:
        check_reward_model(config.model.path, config.reward_model.label_weights, per_token=True)
    if config.value_model.enabled:
        check_start(config.critic_start.path, config.reward_model.label_weights)


def _config_and_head(path: str) -> tuple[ConfigFile, StoredHead | None] | None:
    config = ConfigFile.read(path)
    if config is None or is_pickled(path):
        return None
    require_decoder(path, config)
    return config, stored_head(path)
