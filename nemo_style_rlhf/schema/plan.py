"""Configuration of the memory preflight: both processes of a run, and their devices."""

from dataclasses import dataclass

from nemo_style_rlhf.schema.base import require
from nemo_style_rlhf.schema.pair import PairConfig


@dataclass
class PlanConfig(PairConfig):
    """Configuration of `trainers/plan.py`."""

    device_gib: float | None = None
    """Memory of one device in GiB; null takes that of this machine's CUDA device, or of this host if there is none."""
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
