"""Configuration of a run on one host, started by one command."""

from dataclasses import dataclass

from nemo_style_rlhf.schema.pair import LaunchedConfig


@dataclass
class PPOLocalConfig(LaunchedConfig):
    """Configuration of `trainers/train_ppo_local.py`."""

    devices: list[str] | None = None
    """CUDA devices of the actor, by number or UUID; null shows it all devices."""
    critic_devices: list[str] | None = None
    """CUDA devices of the critic server."""
