"""Configuration of the reward-only server, ``conf/reward_server.yaml``."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from nemo_style_rlhf.schema.base import require, setting
from nemo_style_rlhf.schema.common import ModelConfig, RunConfig
from nemo_style_rlhf.schema.critic import CriticServerConfig, require_label_weights


@dataclass
class RewardServerRunConfig(RunConfig):
    """Device, seed and threads of the server."""

    output_dir: str = "."
    """Unused: this server writes no files."""


@dataclass
class RewardModelConfig:
    """Settings for scoring texts."""

    max_length: int = setting(0, ge=0, expected="a number of tokens, or 0 for the model's own")
    """Longest accepted sequence, in tokens; 0 takes the model's own limit."""
    append_eos: bool | None = None
    """End every response with the end-of-text token; null does as in the reward model's training."""
    normalize_rewards: bool = False
    """Serve (reward - mean) / std, by the statistics stored with the reward model."""
    label_weights: list[float] | None = None
    """One weight for each label of a model with several. The reward is the weighted sum of the labels."""
    micro_batch_tokens: int = setting(16384, gt=0, expected="a number of tokens above 0")
    """Maximum padded tokens (rows x longest row) of one forward; a longer single sequence gets its own."""
    row_multiple: int | None = setting(None, gt=0, expected="a number of rows above 0, or null")
    """As engine.row_multiple."""

    def validate(self) -> None:
        require_label_weights("reward.label_weights", self.label_weights)


@dataclass
class RewardServerProcessConfig:
    """Configuration of ``servers/serve_reward_model.py``."""

    run: RewardServerRunConfig = field(default_factory=RewardServerRunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    """The reward model, decoder or encoder, in a layout of docs/models.md. It is frozen: keys about training have no effect."""
    reward: RewardModelConfig = field(default_factory=RewardModelConfig)
    server: CriticServerConfig = field(default_factory=lambda: CriticServerConfig(port=5568))

    def idle(self) -> Iterator[tuple[str, str]]:
        """See :func:`base.idle_settings`."""
        yield "model.gradient_checkpointing", "does nothing: this server trains nothing"

    def validate(self) -> None:
        require(
            self.model.lora.rank == 0,
            "model.lora.rank",
            self.model.lora.rank,
            "0: this server trains nothing; merge an adapter with trainers/merge_lora.py and serve the result",
        )
