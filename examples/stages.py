"""The stages the examples share, as commands: supervised ones, PPO, training with an environment."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline import Pipeline, overrides

from nemo_style_rlhf.launch.environment import has_nvidia
from nemo_style_rlhf.launch.program import trainer

Settings = Mapping[str, Any]
ON_CPU = ["run.device=cpu"] if has_nvidia() else []
"""These small models learn in fp32. No test has shown yet that vLLM computes it on a GPU as exactly as the trainer."""
SAMPLES_ON_CPU = [*ON_CPU, "generation=hf"] if ON_CPU else []
"""For hosts whose vLLM is the build for GPUs."""


def train(pipeline: Pipeline, stage: str, settings: Settings) -> float:
    """Run a supervised stage (sft, reward_model, dpo or kto), and show its progress; returns its seconds."""
    rest = dict(settings)
    return pipeline.run(trainer(f"train_{stage}", rest.pop("run.output_dir"), *overrides(rest), *ON_CPU), shown=True)


def train_ppo(pipeline: Pipeline, critic: Settings, actor: Settings, output_dir: Path) -> float:
    """Run PPO with a critic server, both below ``output_dir``, and show the progress; returns the seconds."""
    words = [*overrides(actor), *SAMPLES_ON_CPU, *(f"critic.{word}" for word in [*overrides(critic), *ON_CPU])]
    return pipeline.run(trainer("train_ppo_local", output_dir, *words), shown=True)


def train_with_environment(pipeline: Pipeline, actor: Settings, output_dir: Path) -> float:
    """Run training without a critic, and show its progress; returns its seconds."""
    return pipeline.run(trainer("train_ppo_actor", output_dir, *overrides(actor), *SAMPLES_ON_CPU), shown=True)
