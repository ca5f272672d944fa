"""What a run writes for people to watch."""

from dataclasses import dataclass, field


@dataclass
class WandbConfig:
    enabled: bool = False
    project: str = "nemo_style_rlhf"
    name: str | None = None
    offline: bool = False
    """Write below the output folder, to be sent later with `wandb sync`."""


@dataclass
class TrackingConfig:
    """metrics.jsonl is always written."""

    progress: bool = True
    """A progress bar on the terminal."""
    tensorboard: bool = False
    wandb: WandbConfig = field(default_factory=WandbConfig)
    save_rollouts: bool = True
    """rollouts/step_XXXXXX.jsonl with every sample."""
