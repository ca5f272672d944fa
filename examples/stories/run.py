"""PPO on a model pretrained elsewhere: happier stories from stories260K.

    .venv-actor/bin/python examples/stories/run.py --data DATA

The reward model learns from pairs of the model's own continuations, ranked by the VADER lexicon; PPO sees only the reward
model. The valence itself is measured on held-out prompts before and after.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from curves import last_metric, plot_curves, read_metrics
from data import cut_prompts, load_lexicon, rank, valence, write_jsonl
from pipeline import ROOT, Pipeline, console, run_example, say
from sampling import Samples, sample
from stages import train, train_ppo

RESPONSE_TOKENS = 64
CUTS_PER_STORY = 1
SAMPLES_PER_PROMPT = 4
VALIDATION_SHARE = 0.1
EVALUATION_ROUNDS = 4
PPO_STEPS = 40
LORA_LR = 3e-3

REWARD_MODEL = {
    "model.dtype": "float32",
    "data.append_eos": False,  # continuations are cut at 64 tokens, as PPO's will be
    "engine.optim.lr": 2e-3,
    "trainer.batch_size": 64,
    "trainer.max_steps": 130,
    "trainer.micro_batch_size": 8,  # eager attention over 128 rows spills out of the cache: twice the time
    "trainer.log_interval": 20,
}
CRITIC = {
    "model.dtype": "float32",
    "engine.zero_stage": 0,
    "engine.optim.lr": 1e-3,
}
ACTOR = {
    "model.dtype": "float32",
    "engine.zero_stage": 0,
    "engine.optim.lr": 1.5e-4,
    "algorithm.max_steps": PPO_STEPS,
    "algorithm.num_rollout_samples": 128,
    "algorithm.mini_batches": 4,
    "algorithm.critic_warmup_steps": 3,
    "algorithm.initial_policy_kl_penalty": 0.15,
    "generation.max_length": RESPONSE_TOKENS,
    "checkpoint.save_interval": PPO_STEPS,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="holds stories260K/, tinystories/ and vader/")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--steps", type=int, default=PPO_STEPS, help="PPO steps")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "outputs" / "stories")
    parser.add_argument("--lora-rank", type=int, default=0, help="train adapters of both models, not all their weights")
    arguments = parser.parse_args()
    data, output_dir = arguments.data.resolve(), arguments.output_dir.resolve()
    run_example(
        lambda pipeline: happier_stories(
            pipeline, data, output_dir, arguments.seed, arguments.lora_rank, arguments.steps
        ),
        output_dir,
    )


def happier_stories(pipeline: Pipeline, data: Path, output_dir: Path, seed: int, lora_rank: int, steps: int) -> None:
    """All stages; everything is written below ``output_dir``."""
    lora = {"model.lora.rank": lora_rank, "engine.optim.lr": LORA_LR} if lora_rank else {}
    policy, reward_model = data / "stories260K", output_dir / "reward_model" / "export"
    lexicon = load_lexicon(data / "vader" / "vader_lexicon.txt")
    held_out = make_reward_model(pipeline, data, output_dir, seed)

    say("PPO: critic server and actor")
    ppo_seconds = train_ppo(
        pipeline,
        {**CRITIC, **lora, "run.seed": seed, "model.path": reward_model},
        {
            **ACTOR,
            **lora,
            "run.seed": seed,
            "algorithm.max_steps": steps,
            "checkpoint.save_interval": steps,
            "model.path": policy,
            "data.train_path": output_dir / "data" / "prompts_train.jsonl",
        },
        output_dir,
    )
    say(f"  {ppo_seconds:.0f} s")

    prompts = held_out * EVALUATION_ROUNDS
    settings = {"max_new_tokens": RESPONSE_TOKENS, "seed": seed, "reward_dir": str(reward_model)}
    before = sample(str(policy), prompts, reference_dir=str(policy), **settings)
    after = sample(str(output_dir / "actor" / "export"), prompts, reference_dir=str(policy), **settings)
    summary = {
        "seed": seed,
        "valence_before": mean_valence(before, lexicon),
        "valence_after": mean_valence(after, lexicon),
        "reward_before": before.mean_reward,
        "reward_after": after.mean_reward,
        "kl_per_token": after.kl_per_token,
        "distinct_before": len(set(before.responses)),
        "distinct_after": len(set(after.responses)),
        "samples": len(prompts),
        "ppo_seconds": ppo_seconds,
    }
    (output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    runs = {"": [read_metrics(output_dir / "actor" / "metrics.jsonl")]}
    plot_curves(runs, output_dir / "curves.png", title="stories260K: PPO")
    show(before, after, summary)


def make_reward_model(pipeline: Pipeline, data: Path, output_dir: Path, seed: int) -> list[str]:
    """Prompts in ``output_dir/data`` and a reward model in ``output_dir/reward_model``; returns the held-out prompts."""
    policy, made, reward_model = data / "stories260K", output_dir / "data", output_dir / "reward_model"
    lexicon = load_lexicon(data / "vader" / "vader_lexicon.txt")
    train_prompts, held_out = cut_prompts(data / "tinystories" / "stories.jsonl", random.Random(seed), CUTS_PER_STORY)
    write_jsonl(made / "prompts_train.jsonl", [{"prompt": prompt} for prompt in train_prompts])
    write_jsonl(made / "prompts_validation.jsonl", [{"prompt": prompt} for prompt in held_out])

    started = time.monotonic()
    say(f"sampling {SAMPLES_PER_PROMPT} continuations each of {len(train_prompts)} prompts")
    every = [prompt for prompt in train_prompts for _ in range(SAMPLES_PER_PROMPT)]
    own = sample(str(policy), every, max_new_tokens=RESPONSE_TOKENS, seed=seed, batch_size=256)
    edge = round(len(every) * (1 - VALIDATION_SHARE)) // SAMPLES_PER_PROMPT * SAMPLES_PER_PROMPT
    write_jsonl(made / "pairs_train.jsonl", rank(own.prompts[:edge], own.responses[:edge], lexicon))
    write_jsonl(made / "pairs_validation.jsonl", rank(own.prompts[edge:], own.responses[edge:], lexicon))
    say(f"  {time.monotonic() - started:.0f} s")

    say("training the reward model on pairs of them")
    files = {"data.train_path": made / "pairs_train.jsonl", "data.val_path": made / "pairs_validation.jsonl"}
    where = {"run.output_dir": reward_model, "model.path": policy, "run.seed": seed}
    seconds = train(pipeline, "reward_model", {**REWARD_MODEL, **files, **where})
    say(f"  {seconds:.0f} s, held-out pair accuracy {last_metric(reward_model, 'val/pair_accuracy'):.3f}")
    return held_out


def mean_valence(samples: Samples, lexicon: dict[str, float]) -> float:
    """Mean VADER valence of the responses."""
    return sum(valence(response, lexicon) for response in samples.responses) / len(samples.responses)


def show(before: Samples, after: Samples, summary: dict[str, float]) -> None:
    table = Table(title=f"{summary['samples']} continuations of held-out prompts")
    for column in ("", "before", "after"):
        table.add_column(column, justify="left" if not column else "right")
    for name in ("valence", "reward", "distinct"):
        table.add_row(name, f"{summary[f'{name}_before']:.2f}", f"{summary[f'{name}_after']:.2f}")
    table.add_row("KL to the reference, nats per token", "0.000", f"{after.kl_per_token:.3f}")
    console.print(table)
    samples = Table("prompt", "before", "after", title="Samples", show_lines=True)
    for index in range(3):
        samples.add_row(before.prompts[index], before.responses[index], after.responses[index])
    console.print(samples)


if __name__ == "__main__":
    main()
