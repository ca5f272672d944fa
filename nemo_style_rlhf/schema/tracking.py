"""Output of a run for people to watch."""

from dataclasses import dataclass, field


@dataclass
class WandbConfig:
    enabled: bool = False
    project: str = "nemo_style_rlhf"
    entity: str | None = None
    """Team or user that owns the project; null takes your account's default."""
    group: str | None = None
    """Group of runs that W&B shows together."""
    name: str | None = None
    offline: bool = False
    """Write below the output folder, for a later `wandb sync`."""


@dataclass
class TrackingConfig:
    """Optional outputs; metrics.jsonl is always written."""

    progress: bool = True
    """Show a progress bar on the terminal."""
    tensorboard: bool = False
    wandb: WandbConfig = field(default_factory=WandbConfig)
    save_rollouts: bool = True
    """Write every sample to rollouts/step_XXXXXX.jsonl."""
