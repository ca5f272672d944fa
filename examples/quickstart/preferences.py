"""DPO and KTO on the quickstart's preference pairs, judged by the gold rule as PPO was.

    .venv-actor/bin/python examples/quickstart/preferences.py        # after `make quickstart`

Both start from the SFT model and see the pairs that the reward model saw, a tenth of them labeled the wrong way round.
Results: outputs/preferences/summary.json.
"""

import argparse
import json
import sys
from pathlib import Path

from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline import ROOT, Pipeline, console, run_example, say
from run import Judged, judge
from stages import train

COMMON = {
    "model.dtype": "float32",
    "trainer.batch_size": 32,
    "engine.optim.lr": 2e-4,
}
STAGES = {
    "dpo": {"beta": 0.1, "nll_weight": 0.2},
    "kto": {"beta": 0.1},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quickstart", type=Path, default=ROOT / "outputs" / "quickstart", help="what that has made")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "outputs" / "preferences")
    arguments = parser.parse_args()
    quickstart, output_dir = arguments.quickstart.resolve(), arguments.output_dir.resolve()
    if not (quickstart / "summary.json").exists():
        parser.error(f"{quickstart} holds no finished quickstart: run `make quickstart` first, or give --quickstart")
    run_example(lambda pipeline: compare(pipeline, quickstart, output_dir, arguments.seed), output_dir)


def compare(pipeline: Pipeline, quickstart: Path, output_dir: Path, seed: int) -> None:
    """Both stages, below ``output_dir``."""
    data, sft = quickstart / "data", quickstart / "sft" / "export"
    results = {"sft": judge(sft, quickstart, seed), "ppo": judge(quickstart / "actor" / "export", quickstart, seed)}
    for stage, settings in STAGES.items():
        say(f"training with {stage.upper()}")
        files = {"data.train_path": data / "pairs_train.jsonl", "data.val_path": data / "pairs_validation.jsonl"}
        where = {"run.output_dir": output_dir / stage, "run.seed": seed, "model.path": sft}
        seconds = train(pipeline, stage, {**COMMON, **settings, **files, **where})
        say(f"  {seconds:.0f} s")
        results[stage] = judge(output_dir / stage / "export", quickstart, seed)
    summary = {name: numbers(judged) for name, judged in results.items()}
    (output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    table = Table("", *summary["sft"], title="Held-out prompts")
    for name, row in summary.items():
        table.add_row(name, *(f"{value:.3f}" for value in row.values()))
    console.print(table)


def numbers(judged: Judged) -> dict[str, float]:
    return {
        "gold": judged.gold,
        "reward": judged.samples.mean_reward,
        "kl_per_token": judged.samples.kl_per_token,
        "grammatical": judged.grammatical,
        "distinct": judged.distinct,
    }


if __name__ == "__main__":
    main()
