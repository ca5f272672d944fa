"""A policy that learns to halve: it guesses a number from 1 to 32, and hears "higher" or "lower" after every guess.

    .venv-actor/bin/python examples/agents/guessing/run.py --seed 1

A small model reads random games (SFT), and then plays for itself: examples/agents/guessing/environment.py. Everything is made
here, nothing is downloaded. Results: outputs/guessing/summary.json and curves.png.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "quickstart"))
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from curves import last_metric, plot_curves, read_metrics
from environment import NUMBERS
from make_data import train_tokenizer, write_jsonl
from pipeline import ROOT, Pipeline, run_example, say
from small_model import model_config
from stages import train, train_with_environment

PROMPT = "Guess:"
GAMES = 16_000
CARELESS = 0.2
"""Share of the guesses in the games of SFT that ignore what was said."""
SFT = {
    "model.init": "random",
    "model.dtype": "float32",
    "engine.optim.lr": 3e-3,
    "trainer.batch_size": 64,
    "trainer.log_interval": 20,
}
ACTOR = {
    "model.dtype": "float32",
    "engine.zero_stage": 0,
    "engine.optim.lr": 1e-3,
    "engine.scheduler.name": "linear",
    "algorithm": "reinforce_pp",
    "algorithm.num_rollout_samples": 512,
    "algorithm.mini_batches": 8,
    "algorithm.initial_policy_kl_penalty": 0,
    "algorithm.num_val_samples": 512,
    "reward": "environment",
    "agent.path": Path(__file__).parent / "environment.py",
    "agent.name": "Game",
    "agent.max_turns": 12,
    "generation.max_length": 12,
}

PANELS = {"agent/turns": "guesses in a game", "environment/found": "share of games that end within 12 guesses"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=120, help="steps of training with the environment")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "outputs" / "guessing")
    arguments = parser.parse_args()
    output_dir = arguments.output_dir.resolve()
    run_example(lambda pipeline: learn(pipeline, output_dir, arguments.seed, arguments.steps), output_dir)


def learn(pipeline: Pipeline, output_dir: Path, seed: int, steps: int) -> None:
    """All stages; everything is written below ``output_dir``."""
    started = time.monotonic()
    data, sft, actor = output_dir / "data", output_dir / "sft", output_dir / "actor"
    data.mkdir(parents=True)
    rng = random.Random(seed)
    games = [" ".join(game(rng)) for _ in range(GAMES)]
    write_jsonl(data / "games.jsonl", ({"prompt": PROMPT, "response": f" {each}"} for each in games))
    write_jsonl(data / "prompts.jsonl", ({"prompt": PROMPT} for _ in range(512)))
    tokenizer = train_tokenizer(f"{PROMPT} {each}" for each in games)
    tokenizer.save_pretrained(data / "base")
    model_config(tokenizer).save_pretrained(data / "base")

    say("reading random games (SFT)")
    files = {"data.train_path": data / "games.jsonl", "run.output_dir": sft, "model.path": data / "base"}
    seconds = train(pipeline, "sft", {**SFT, "run.seed": seed, **files})
    say(f"  {seconds:.0f} s")
    say("playing")
    settings = {
        **ACTOR, "run.seed": seed, "model.path": sft / "export", "data.train_path": data / "prompts.jsonl",
        "data.val_path": data / "prompts.jsonl", "algorithm.max_steps": steps, "algorithm.val_check_interval": steps,
        "checkpoint.save_interval": steps,
    }  # fmt: skip
    seconds = train_with_environment(pipeline, settings, actor)
    say(f"  {seconds:.0f} s")

    rows = read_metrics(actor / "metrics.jsonl")
    turns = [row["val_rollouts/agent/turns"] for row in rows if "val_rollouts/agent/turns" in row]
    summary = {
        "seed": seed,
        "turns_before": turns[0],
        "turns_after": turns[-1],
        "turns_of_bisection": bisection(NUMBERS) / NUMBERS,
        "found_before": next(row["val_rollouts/environment/found"] for row in rows if turns[0] in row.values()),
        "found_after": last_metric(actor, "val_rollouts/environment/found"),
        "seconds": time.monotonic() - started,
    }
    (output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    plot_curves(
        {"": [rows]}, output_dir / "curves.png", title="Guessing: REINFORCE++ with an environment", panels=PANELS
    )
    say(
        f"guesses in a game: {summary['turns_before']:.2f} before, {summary['turns_after']:.2f} after; halving takes "
        f"{summary['turns_of_bisection']:.2f}"
    )
    say(f"written: {output_dir / 'summary.json'}, {output_dir / 'curves.png'}")


def game(rng: random.Random) -> Iterator[str]:
    """The words of a game that is played at random: guesses, and what is said to them."""
    number, low, high = rng.randint(1, NUMBERS), 1, NUMBERS
    while True:
        guess = rng.randint(1, NUMBERS) if rng.random() < CARELESS else rng.randint(low, high)
        yield str(guess)
        if guess == number:
            return
        yield "higher" if guess < number else "lower"
        low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))


def bisection(count: int) -> int:
    """Sum of the guesses that halving needs, over all of ``count`` numbers."""
    if count == 0:
        return 0
    below = (count - 1) // 2
    return count + bisection(below) + bisection(count - 1 - below)


if __name__ == "__main__":
    main()
