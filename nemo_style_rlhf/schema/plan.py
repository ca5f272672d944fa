"""Configuration of the memory preflight: both processes of a run, and their devices."""

from dataclasses import dataclass, field

from nemo_style_rlhf.schema.base import require, setting
from nemo_style_rlhf.schema.common import TrainerRunConfig
from nemo_style_rlhf.schema.data import PromptDataConfig
from nemo_style_rlhf.schema.pair import PairConfig


@dataclass
class PlanConfig(PairConfig):
    """Configuration of `trainers/plan.py`."""

    run: TrainerRunConfig = field(default_factory=lambda: TrainerRunConfig(output_dir="outputs"))
    """A plan writes nothing."""
    data: PromptDataConfig = field(default_factory=lambda: PromptDataConfig(train_path=""))
    """Without data, prompts count as data.max_prompt_length long."""
    device_gib: float | None = setting(None, gt=0, expected="the GiB of one device")
    """Memory of one device in GiB; null takes the memory of this machine's CUDA device, or of this host without one."""
    device_tflops: float | None = setting(None, gt=0, expected="a number above 0")
    """Peak of one device's matrix products in model.dtype, dense, in 10^12 FLOP/s, as in its data sheet: 989 for an H100 SXM in
    bf16. With device_gb_per_s the plan also estimates the seconds of a step; null leaves them out."""
    device_gb_per_s: float | None = setting(None, gt=0, expected="a number above 0")
    """Peak bandwidth of one device's memory in 10^9 bytes/s: 3350 for an H100 SXM."""
    together: bool = False
    """Both processes share the devices, so that their sum must fit."""

    @property
    def unread(self) -> tuple[str, ...]:
        """Like :attr:`PPOActorConfig.unread`: a plan looks only at models and prompts."""
        return ("reward", "remote_critic_rm", "critic.server", "generation.backend")

    def validate(self) -> None:
        super().validate()
        require(
            (self.device_tflops is None) == (self.device_gb_per_s is None),
            "device_gb_per_s",
            self.device_gb_per_s,
            "given together with device_tflops, since the seconds of a step need both",
        )
