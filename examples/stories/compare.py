"""Every algorithm on the same task, steered to the same KL: the table of docs/algorithms.md.

    .venv-actor/bin/python examples/stories/compare.py --data DATA

One reward model as in run.py; then each algorithm for a few steps per seed, its KL coefficient steered to the same target
by the adaptive controller, and its policy measured on held-out prompts. Needs the server and the actor environment.
"""

import argparse
import json
import math
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from curves import plot_curves, read_metrics
from data import load_lexicon
from pipeline import ROOT, Pipeline
from run import ACTOR, CRITIC, RESPONSE_TOKENS, make_reward_model, mean_valence
from sampling import sample
from stages import train_ppo

KL_TARGET = 0.08
COMMON = {
    **ACTOR,
    "algorithm.kl_target": KL_TARGET,
    "algorithm.kl_horizon": 128,
    "algorithm.initial_policy_kl_penalty": 0.1,
}
GROUPS = {"algorithm.critic_warmup_steps": 0, "algorithm.samples_per_prompt": 8}
PRESETS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "reinforce_pp": {**GROUPS, "algorithm.samples_per_prompt": 1},
    "reinforce_pp_baseline": GROUPS,
    "grpo": GROUPS,
    "dr_grpo": {**GROUPS, "engine.optim.lr": 3e-4},
    "rloo": GROUPS,
    "gspo": GROUPS,
}


def stale(staleness: int, correction: str) -> dict[str, Any]:
    """PPO on samples of older weights. A controller of KL swings, and reward with it, so the coefficient is fixed."""
    return {
        "algorithm": "ppo",
        "algorithm.staleness": staleness,
        "algorithm.correction.kind": correction,
        "algorithm.allow_uncorrected": True,
        "algorithm.kl_target": 0.0,
        "algorithm.initial_policy_kl_penalty": 0.15,
    }


STALE = {
    "ppo_stale_0": stale(0, "none"),
    "ppo_stale_1": stale(1, "tis"),
    "ppo_stale_1_uncorrected": stale(1, "none"),
    "ppo_stale_3": stale(3, "tis"),
    "ppo_stale_3_uncorrected": stale(3, "none"),
}
"""The arms of docs/asynchronous.md."""
console = Console(highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="holds stories260K/, tinystories/ and vader/")
    parser.add_argument("--algorithms", nargs="+", default=list(PRESETS), choices=[*PRESETS, *STALE])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output-dir", type=Path, default=ROOT / "outputs" / "stories_compare")
    arguments = parser.parse_args()
    output_dir, data = arguments.output_dir.resolve(), arguments.data.resolve()
    with Pipeline(output_dir / "logs") as pipeline:
        held_out = reward_model_once(pipeline, data, output_dir)
        lexicon = load_lexicon(data / "vader" / "vader_lexicon.txt")

        def measured(policy: Path) -> dict[str, float]:
            samples = sample(
                str(policy), held_out, max_new_tokens=RESPONSE_TOKENS, seed=0,
                reward_dir=str(output_dir / "reward_model" / "export"), reference_dir=str(data / "stories260K"),
            )  # fmt: skip
            return {
                "reward": samples.mean_reward,
                "standard_error": statistics.stdev(samples.rewards) / math.sqrt(len(samples.rewards)),
                "valence": mean_valence(samples, lexicon),
                "kl": samples.kl_per_token,
            }

        results: dict[str, list[dict[str, float]]] = {"before": [measured(data / "stories260K")]}
        for algorithm in arguments.algorithms:
            for seed in arguments.seeds:
                folder = output_dir / f"{algorithm}_{seed}"
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                train(pipeline, algorithm, seed, arguments.steps, data, output_dir, folder)
                steps = [row["timers/step"] for row in read_metrics(folder / "actor" / "metrics.jsonl")]
                result = {**measured(folder / "actor" / "export"), "seconds_per_step": statistics.median(steps)}
                results.setdefault(algorithm, []).append(result)
                console.print(f"{algorithm} seed {seed}: {json.dumps(result)}")
                (output_dir / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    runs = {
        algorithm: [
            read_metrics(output_dir / f"{algorithm}_{seed}" / "actor" / "metrics.jsonl") for seed in arguments.seeds
        ]
        for algorithm in arguments.algorithms
    }
    plot_curves(runs, output_dir / "curves.png", title="stories260K, means over seeds")
    print(table(results))


def reward_model_once(pipeline: Pipeline, data: Path, output_dir: Path) -> list[str]:
    """The held-out prompts; makes the reward model unless an earlier call did."""
    kept = output_dir / "data" / "prompts_validation.jsonl"
    if not (output_dir / "reward_model" / "export" / "config.json").exists():
        make_reward_model(pipeline, data, output_dir, seed=1234)
    return [json.loads(line)["prompt"] for line in kept.read_text().splitlines()]


def train(
    pipeline: Pipeline, algorithm: str, seed: int, steps: int, data: Path, output_dir: Path, folder: Path
) -> None:
    actor = {
        **COMMON,
        "algorithm": algorithm,
        "algorithm.max_steps": steps,
        "checkpoint.save_interval": steps,
        "run.seed": seed,
        "model.path": data / "stories260K",
        "data.train_path": output_dir / "data" / "prompts_train.jsonl",
        **(PRESETS | STALE)[algorithm],
    }
    reward_model = {"run.seed": seed, "model.path": output_dir / "reward_model" / "export"}
    train_ppo(pipeline, {**CRITIC, **reward_model}, actor, folder)


def table(results: dict[str, list[dict[str, float]]]) -> str:
    """Markdown: means over seeds; the rise in reward in standard errors, over seeds and samples together."""
    (before,) = results["before"]
    lines = [
        "| algorithm | seeds | reward | rise in standard errors | valence | KL per token | seconds per step |",
        "|---|---|---|---|---|---|---|",
        f"| before | | {before['reward']:.2f} | | {before['valence']:.2f} | 0 | |",
    ]
    for algorithm, runs in results.items():
        if algorithm == "before":
            continue
        rewards = [run["reward"] for run in runs]
        spread = statistics.stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else runs[0]["standard_error"]
        error = math.hypot(spread, before["standard_error"])
        mean = {name: statistics.fmean(run[name] for run in runs) for name in runs[0]}
        lines.append(
            f"| {algorithm} | {len(runs)} | {mean['reward']:.2f} ± {spread:.2f} | "
            f"{(mean['reward'] - before['reward']) / error:.0f} | {mean['valence']:.2f} | {mean['kl']:.3f} | "
            f"{mean['seconds_per_step']:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
