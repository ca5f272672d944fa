"""Configuration of the memory preflight: both processes of a run, and their devices."""

from dataclasses import dataclass, field

from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.base import require
from nemo_style_rlhf.schema.critic import PPOCriticConfig


@dataclass
class PlanConfig(PPOActorConfig):
    """Configuration of `trainers/plan.py`: the actor's keys unchanged, the critic server's with the prefix ``critic.``."""

    critic: PPOCriticConfig = field(default_factory=PPOCriticConfig)
    device_gib: float | None = None
    """Memory of one device in GiB; null takes that of this machine's CUDA device, or of this host if there is none."""
    ranks: int = 1
    """Number of ranks of the actor, each with its own device; on a CPU they share the host."""
    critic_ranks: int = 1
    """Number of ranks of the critic server."""
    together: bool = False
    """Whether both processes share the devices, so that their sum must fit."""

    @property
    def unread(self) -> tuple[str, ...]:
        """Like :attr:`PPOActorConfig.unread`: a plan looks only at models and prompts."""
        return ("reward", "remote_critic_rm", "critic.server", "generation.backend")

    def validate(self) -> None:
        super().validate()
        gib = self.device_gib
        require(gib is None or gib > 0, "device_gib", gib, "the GiB of one device")
        require(self.ranks > 0, "ranks", self.ranks, "a number of ranks above 0")
        size = self.generation.tensor_parallel_size
        require(self.ranks % size == 0, "ranks", self.ranks, f"a multiple of generation.tensor_parallel_size={size}")
        require(self.critic_ranks > 0, "critic_ranks", self.critic_ranks, "a number of ranks above 0")
