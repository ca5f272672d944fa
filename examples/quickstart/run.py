"""The whole product on a small text world: SFT, reward model, critic server, PPO, and what came of it.

    .venv-actor/bin/python examples/quickstart/run.py --seed 1234

With ``--reward function``, examples/quickstart/pleasant.py takes the reward model's place in PPO, and the critic starts from the
SFT model with a new head.

Everything is made here, nothing is downloaded. Results: outputs/quickstart/summary.json and curves.png.
"""

import argparse
import json
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import world
from curves import last_metric, plot_curves, read_metrics
from make_data import make_data
from pipeline import ROOT, Pipeline, console, run_example, say
from sampling import Samples, sample
from stages import train, train_ppo

from nemo_style_rlhf.launch.follow_up import command_line

MAX_RESPONSE_TOKENS = 48
TEMPERATURE = 0.9
"""At 1.0 a model of this size and training puts 3 % of its mass on words that no review has in that place."""
EVALUATION_ROUNDS = 4
PPO_STEPS = 20

SFT = {
    "model.init": "random",
    "model.dtype": "float32",
    "engine.optim.lr": 3e-3,
    "engine.optim.betas": "[0.9,0.99]",
    "engine.scheduler.warmup_steps": 50,
    "trainer.batch_size": 32,
    "trainer.log_interval": 50,
}
REWARD_MODEL = {
    "model.dtype": "float32",
    "engine.optim.lr": 5e-4,
    "trainer.batch_size": 32,
}
CRITIC = {
    "model.dtype": "float32",
    "engine.zero_stage": 0,
    "engine.optim.lr": 5e-4,
}
ACTOR = {
    "model.dtype": "float32",
    "engine.zero_stage": 0,
    "engine.optim.lr": 1e-4,
    "algorithm.max_steps": PPO_STEPS,
    "algorithm.num_rollout_samples": 128,
    "algorithm.mini_batches": 4,
    "algorithm.critic_warmup_steps": 2,
    "algorithm.initial_policy_kl_penalty": 0.1,
    "algorithm.val_check_interval": PPO_STEPS,
    "algorithm.num_val_samples": 64,
    "generation.max_length": MAX_RESPONSE_TOKENS,
    "generation.temperature": TEMPERATURE,
    "checkpoint.save_interval": PPO_STEPS,
}


@dataclass
class Judged:
    """A policy's samples on held-out prompts in numbers."""

    samples: Samples

    def _share(self, count: int) -> float:
        return count / len(self.samples.responses)

    @property
    def gold(self) -> float:
        """Share of reviews the gold rule calls pleasant."""
        return self._share(sum(map(world.is_pleasant, self.samples.texts)))

    @property
    def grammatical(self) -> float:
        """Share of reviews that the grammar generates."""
        return self._share(sum(map(world.is_grammatical, self.samples.texts)))

    @property
    def distinct(self) -> int:
        """Number of different responses."""
        return len(set(self.samples.responses))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--reward", choices=["model", "function"], default="model")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "outputs" / "quickstart")
    arguments = parser.parse_args()
    output_dir = arguments.output_dir.resolve()
    run_example(lambda pipeline: quickstart(pipeline, output_dir, arguments.seed, arguments.reward), output_dir)


def quickstart(pipeline: Pipeline, output_dir: Path, seed: int, reward: str) -> None:
    """All stages; everything is written below ``output_dir``."""
    started = time.monotonic()
    data, sft, reward_model = output_dir / "data", output_dir / "sft", output_dir / "reward_model"
    say("making data: reviews, preference pairs, prompts, a tokenizer")
    make_data(data, seed)
    common = {"run.seed": seed}

    say("training the policy to write reviews (SFT)")
    files = {"data.train_path": data / "sft_train.jsonl", "data.val_path": data / "sft_validation.jsonl"}
    seconds = train(pipeline, "sft", {**SFT, **common, **files, "run.output_dir": sft, "model.path": data / "base"})
    say(f"  {seconds:.0f} s, held-out loss {last_metric(sft, 'val/loss'):.3f} nats per token")

    say("training the reward model on preference pairs")
    files = {"data.train_path": data / "pairs_train.jsonl", "data.val_path": data / "pairs_validation.jsonl"}
    where = {"run.output_dir": reward_model, "model.path": sft / "export"}
    seconds = train(pipeline, "reward_model", {**REWARD_MODEL, **common, **files, **where})
    say(f"  {seconds:.0f} s, held-out pair accuracy {last_metric(reward_model, 'val/pair_accuracy'):.3f}")

    say("answering held-out prompts before PPO")
    before = judge(sft / "export", output_dir, seed)
    say("PPO: critic server and actor")
    files = {"data.train_path": data / "prompts_train.jsonl", "data.val_path": data / "prompts_validation.jsonl"}
    critic = {**CRITIC, **common, "model.path": reward_model / "export"}
    actor = {**ACTOR, **common, **files, "model.path": sft / "export"}
    if reward == "function":
        critic |= {"model.path": sft / "export", "reward_model.combine_rm_and_critic_server": "false"}
        actor |= {"reward": "function", "reward.function.path": Path(__file__).parent / "pleasant.py"}
    ppo_seconds = train_ppo(pipeline, critic, actor, output_dir)
    say(f"  {ppo_seconds:.0f} s")
    say("answering held-out prompts after PPO")
    after = judge(output_dir / "actor" / "export", output_dir, seed)

    runs = {"": [read_metrics(output_dir / "actor" / "metrics.jsonl")]}
    plot_curves(runs, output_dir / "curves.png", title="Quickstart: PPO")
    summary = summarise(before, after, seed, ppo_seconds, time.monotonic() - started)
    (output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    show(before, after, summary)
    say(f"written: {output_dir / 'summary.json'}, {output_dir / 'curves.png'}")
    watch = f"{command_line('trainers/watch.py', {})} {shlex.quote(str(output_dir))}"
    say(f"every token of PPO in the browser: {watch}")


def judge(policy: Path, output_dir: Path, seed: int) -> Judged:
    """Sample ``policy`` on the held-out prompts; score, and compare with the SFT model."""
    lines = (output_dir / "data" / "prompts_validation.jsonl").read_text().splitlines()
    return Judged(
        sample(
            str(policy),
            [json.loads(line)["prompt"] for line in lines] * EVALUATION_ROUNDS,
            max_new_tokens=MAX_RESPONSE_TOKENS,
            temperature=TEMPERATURE,
            seed=seed,
            reward_dir=str(output_dir / "reward_model" / "export"),
            reference_dir=str(output_dir / "sft" / "export"),
        )
    )


def summarise(before: Judged, after: Judged, seed: int, ppo_seconds: float, total_seconds: float) -> dict[str, float]:
    """The content of summary.json."""
    return {
        "seed": seed,
        "gold_before": before.gold,
        "gold_after": after.gold,
        "reward_before": before.samples.mean_reward,
        "reward_after": after.samples.mean_reward,
        "kl_per_token": after.samples.kl_per_token,
        "grammatical_before": before.grammatical,
        "grammatical_after": after.grammatical,
        "distinct_before": before.distinct,
        "distinct_after": after.distinct,
        "samples": len(after.samples.responses),
        "ppo_seconds": ppo_seconds,
        "total_seconds": total_seconds,
    }


def show(before: Judged, after: Judged, summary: dict[str, float]) -> None:
    """The table, and the same held-out prompts before and after."""
    table = Table(title=f"{len(after.samples.responses)} samples on held-out prompts")
    for column in ("", "before", "after"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("reward-model score", f"{summary['reward_before']:.3f}", f"{summary['reward_after']:.3f}")
    table.add_row("gold score: share of pleasant reviews", f"{before.gold:.3f}", f"{after.gold:.3f}")
    table.add_row("KL to the reference, nats per token", "0.000", f"{after.samples.kl_per_token:.3f}")
    table.add_row("grammatical", f"{before.grammatical:.3f}", f"{after.grammatical:.3f}")
    table.add_row("distinct responses", str(before.distinct), str(after.distinct))
    console.print(table)
    samples = Table("prompt", "before", "after", title="Samples", show_lines=True)
    for index in range(4):
        responses = (judged.samples.responses[index].strip() for judged in (before, after))
        samples.add_row(before.samples.prompts[index], *responses)
    console.print(samples)


if __name__ == "__main__":
    main()
