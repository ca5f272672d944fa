"""The curves of a PPO run from its metrics.jsonl."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PANELS = {
    "train_rollouts/rewards": "reward-model score",
    "train_rollouts/init_policy_kl": "KL to the reference, nats per response token",
}
COLORS = ("#2f6f9f", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Distinct to the color-blind (Okabe and Ito)."""
Rows = list[dict[str, float]]


def read_metrics(path: Path) -> Rows:
    """The lines of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def last_metric(run_dir: Path, name: str) -> float:
    """The last value of ``name`` in a run's metrics.jsonl."""
    return next(line[name] for line in reversed(read_metrics(run_dir / "metrics.jsonl")) if name in line)


def plot_curves(
    runs: Mapping[str, Sequence[Rows]], target: Path, *, title: str, panels: Mapping[str, str] = PANELS
) -> None:
    """Write ``panels``, title by metric, over steps as a PNG: a line for each name of ``runs``, the mean of its runs with
    different seeds."""
    figure, axes = plt.subplots(1, len(panels), figsize=(10, 3.6), layout="constrained")
    for axis, (name, label) in zip(axes, panels.items(), strict=True):
        for (run, seeds), color in zip(runs.items(), COLORS, strict=False):
            points: dict[float, list[float]] = defaultdict(list)
            for line in (line for rows in seeds for line in rows if name in line):
                points[line["step"]].append(line[name])
            axis.plot(
                list(points), [fmean(values) for values in points.values()], color=color, linewidth=1.8, label=run
            )
        axis.set(xlabel="step", title=label)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    if len(runs) > 1:
        axes[0].legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(target, dpi=130)
    plt.close(figure)
