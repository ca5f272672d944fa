"""The stages the examples share, as commands: supervised ones, critic server, PPO."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline import ACTOR_PYTHON, SERVER_PYTHON, Pipeline, overrides

Settings = Mapping[str, Any]


def train(pipeline: Pipeline, stage: str, settings: Settings) -> float:
    """Seconds of a supervised stage: sft, reward_model, dpo or kto."""
    return pipeline.run(stage, [ACTOR_PYTHON, f"trainers/train_{stage}.py", *overrides(settings)])


def train_ppo(pipeline: Pipeline, server: Settings, actor: Settings, output_dir: Path) -> float:
    """Start the critic server, run the actor against it, stop the server; the actor's seconds."""
    return _train(pipeline, "serve_ppo_critic", "ppo_critic", "remote_critic_rm.port", server, actor, output_dir)


def train_without_critic(pipeline: Pipeline, server: Settings, actor: Settings, output_dir: Path) -> float:
    """The same against a reward-only server, for algorithms that need no critic; ``actor`` must say reward=server."""
    return _train(pipeline, "serve_reward_model", "reward_server", "reward.server.port", server, actor, output_dir)


def _train(
    pipeline: Pipeline,
    script: str,
    config_name: str,
    port_key: str,
    server: Settings,
    actor: Settings,
    output_dir: Path,
) -> float:
    ready_file = output_dir / "server_ready.json"
    ready_file.unlink(missing_ok=True)
    door = {"run.output_dir": output_dir / "critic", "server.port": 0, "server.ready_file": ready_file}
    command = [SERVER_PYTHON, f"servers/{script}.py", f"--config-name={config_name}"]
    pipeline.start("critic", [*command, *overrides({**server, **door})])
    port = pipeline.wait_for_server("critic", ready_file)["port"]
    where = {"run.output_dir": output_dir / "actor", port_key: port}
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
