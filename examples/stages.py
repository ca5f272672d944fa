"""The four stages the examples share, as commands: SFT, reward model, critic server, PPO."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline import ACTOR_PYTHON, SERVER_PYTHON, Pipeline, overrides

Settings = Mapping[str, Any]


def train_sft(pipeline: Pipeline, settings: Settings) -> float:
    """Seconds of trainers/train_sft.py."""
    return pipeline.run("sft", [ACTOR_PYTHON, "trainers/train_sft.py", *overrides(settings)])


def train_reward_model(pipeline: Pipeline, settings: Settings) -> float:
    """Seconds of trainers/train_reward_model.py."""
    return pipeline.run("reward_model", [ACTOR_PYTHON, "trainers/train_reward_model.py", *overrides(settings)])


def train_ppo(pipeline: Pipeline, server: Settings, actor: Settings, output_dir: Path) -> float:
    """Start the critic server, run the actor against it, stop the server; seconds from the first to the last."""
    ready_file = output_dir / "critic_ready.json"
    ready_file.unlink(missing_ok=True)
    door = {"run.output_dir": output_dir / "critic", "server.port": 0, "server.ready_file": ready_file}
    pipeline.start(
        "critic",
        [SERVER_PYTHON, "servers/serve_ppo_critic.py", "--config-name=ppo_critic", *overrides({**server, **door})],
    )
    port = pipeline.wait_for_server("critic", ready_file)["port"]
    where = {"run.output_dir": output_dir / "actor", "remote_critic_rm.port": port}
    command = [ACTOR_PYTHON, "trainers/train_ppo_actor.py", "--config-name=ppo_actor", *overrides({**actor, **where})]
    seconds = pipeline.run("ppo", command, watch=_progress(output_dir / "actor" / "metrics.jsonl"))
    pipeline.stop("critic")
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
