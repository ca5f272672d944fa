"""The stages the examples share, as commands: supervised ones, critic server, PPO."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline import Pipeline, overrides

from nemo_style_rlhf.launch.program import server, trainer

Settings = Mapping[str, Any]


def train(pipeline: Pipeline, stage: str, settings: Settings) -> float:
    """Seconds of a supervised stage: sft, reward_model, dpo or kto."""
    rest = dict(settings)
    return pipeline.run(trainer(f"train_{stage}", rest.pop("run.output_dir"), *overrides(rest)))


def train_ppo(pipeline: Pipeline, critic: Settings, actor: Settings, output_dir: Path) -> float:
    """Start the critic server, run the actor against it, stop the server; the actor's seconds."""
    return _train(pipeline, "serve_ppo_critic", "remote_critic_rm.port", critic, actor, output_dir)


def train_without_critic(pipeline: Pipeline, reward: Settings, actor: Settings, output_dir: Path) -> float:
    """The same against a reward-only server, for algorithms that need no critic; ``actor`` must say reward=server."""
    return _train(pipeline, "serve_reward_model", "reward.server.port", reward, actor, output_dir)


def _train(
    pipeline: Pipeline, script: str, port_key: str, served: Settings, actor: Settings, output_dir: Path
) -> float:
    pipeline.start(server(script, output_dir / "critic", *overrides(served)))
    settings = {**actor, port_key: pipeline[script].ready()["port"]}
    ppo = trainer("train_ppo_actor", output_dir / "actor", *overrides(settings))
    seconds = pipeline.run(ppo, watch=_progress(output_dir / "actor" / "metrics.jsonl"))
    pipeline.stop(script)
    return seconds


def _progress(metrics: Path) -> Any:
    """A function that reports the newest line of ``metrics`` whenever there is one."""
    from curves import read_metrics

    shown = 0

    def watch() -> None:
        nonlocal shown
        size = metrics.stat().st_size if metrics.exists() else 0
        if size == shown:
            return
        shown = size
        newest = read_metrics(metrics)[-1]
        reward, kl = newest.get("train_rollouts/rewards"), newest.get("train_rollouts/init_policy_kl")
        if reward is not None and kl is not None:
            print(
                f"\r  step {newest['step']:4.0f}   reward {reward:7.3f}   KL per token {kl:6.3f}",
                end="",
                file=sys.stderr,
            )

    return watch
