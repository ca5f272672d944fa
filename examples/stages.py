"""The stages the examples share, as commands: supervised ones, PPO."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline import Pipeline, overrides

from nemo_style_rlhf.launch.program import trainer

Settings = Mapping[str, Any]


def train(pipeline: Pipeline, stage: str, settings: Settings) -> float:
    """Seconds of a supervised stage (sft, reward_model, dpo or kto), which shows its progress."""
    rest = dict(settings)
    return pipeline.run(trainer(f"train_{stage}", rest.pop("run.output_dir"), *overrides(rest)), shown=True)


def train_ppo(pipeline: Pipeline, critic: Settings, actor: Settings, output_dir: Path) -> float:
    """Seconds of PPO with a critic server; both write below ``output_dir``, and show their progress."""
    words = [*overrides(actor), *(f"critic.{word}" for word in overrides(critic))]
    return pipeline.run(trainer("train_ppo_local", output_dir, *words), shown=True)
