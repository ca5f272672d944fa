"""Output of a run for people to watch."""

from dataclasses import dataclass, field

from nemo_style_rlhf.schema.base import setting


@dataclass
class WandbConfig:
    """Weights & Biases."""

    enabled: bool = False
    """Log to Weights & Biases; `tracking=wandb` sets it."""
    project: str = "nemo_style_rlhf"
    """Project of the run."""
    entity: str | None = None
    """Team or user that owns the project; null takes your account's default."""
    group: str | None = None
    """Group of runs that W&B shows together."""
    name: str | None = None
    """Name of the run; null lets W&B choose one."""
    offline: bool = False
    """Write below the output folder, for a later `wandb sync`."""


@dataclass
class RolloutsConfig:
    """Samples on disk, token by token: rollouts/step_XXXXXX.parquet, shown by trainers/watch.py."""

    every: int = setting(1, ge=0, expected="a number of steps, or 0 for no samples on disk")
    """Write the samples of every Nth step; 0 writes none."""
    keep: int = setting(1000, ge=0, expected="a number of steps, or 0 to keep all")
    """Number of written steps that stay on disk, up to 49 more while files are merged; 0 keeps all. 512 samples of 512 response
    tokens take some 10 MB."""

    def is_due(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0


@dataclass
class TrackingConfig:
    """Optional outputs; metrics.jsonl is always written."""

    progress: bool = True
    """Show a progress bar on the terminal."""
    tensorboard: bool = False
    """Log to <run.output_dir>/tensorboard; `tracking=tensorboard` sets it."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    rollouts: RolloutsConfig = field(default_factory=RolloutsConfig)
