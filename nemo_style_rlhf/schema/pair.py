"""Configuration of both processes of a run, for the commands that take the two together."""

from dataclasses import dataclass, field

from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.base import SPEAKER, require
from nemo_style_rlhf.schema.critic import PPOCriticConfig


@dataclass
class PairConfig(PPOActorConfig):
    """The actor's keys unchanged, the critic server's with the prefix ``critic.``."""

    critic: PPOCriticConfig = field(default_factory=PPOCriticConfig, metadata={SPEAKER: "critic"})
    ranks: int = 1
    """Number of ranks of the actor, each with its own device; on a CPU they share the host."""
    critic_ranks: int = 1
    """Number of ranks of the critic server."""

    def validate(self) -> None:
        super().validate()
        require(self.ranks > 0, "ranks", self.ranks, "a number of ranks above 0")
        size = self.generation.sharing_ranks
        require(self.ranks % size == 0, "ranks", self.ranks, f"a multiple of generation.tensor_parallel_size={size}")
        require(self.critic_ranks > 0, "critic_ranks", self.critic_ranks, "a number of ranks above 0")
