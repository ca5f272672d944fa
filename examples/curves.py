"""The curves of a PPO run from its metrics.jsonl."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PANELS = {
    "train_rollouts/rewards": "reward-model score",
    "train_rollouts/init_policy_kl": "KL to the reference, nats per response token",
}


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def last_metric(run_dir: Path, name: str) -> float:
    """The last value of ``name`` in a run's metrics.jsonl."""
    return next(line[name] for line in reversed(read_metrics(run_dir / "metrics.jsonl")) if name in line)


def plot_curves(metrics: list[dict[str, float]], target: Path, *, title: str) -> None:
    """Write reward and KL over PPO steps as a PNG."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(10, 3.6), layout="constrained")
    for axis, (name, label) in zip(axes, PANELS.items(), strict=True):
        points = [(line["step"], line[name]) for line in metrics if name in line]
        axis.plot(*zip(*points, strict=True), color="#2f6f9f", linewidth=1.8)
        axis.set(xlabel="PPO step", title=label)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.savefig(target, dpi=130)
    plt.close(figure)
