"""The examples with tools share this: SFT on conversations, training with the environment, and a report."""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from rich.table import Table
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "quickstart"))

from curves import plot_curves, read_metrics
from make_data import write_jsonl
from pipeline import ROOT, Pipeline, console, run_example, say
from small_model import Message, make_model, said
from stages import train, train_with_environment

from nemo_style_rlhf.launch.program import Program
from nemo_style_rlhf.tracking.sample_files import sample_files

HELD_OUT = 256
SFT = {
    "model.init": "random",
    "model.dtype": "float32",
    "engine.optim.lr": 3e-3,
    "engine.optim.betas": "[0.9,0.99]",
    "engine.scheduler.warmup_steps": 50,
    "trainer.batch_size": 64,
    "trainer.log_interval": 50,
}
ACTOR = {
    "model.dtype": "float32",
    "engine.zero_stage": 0,
    "engine.optim.lr": 3e-4,
    "algorithm": "grpo",
    "algorithm.mini_batches": 2,
    "algorithm.initial_policy_kl_penalty": 0,
    "algorithm.num_val_samples": HELD_OUT,
    "data": "messages",
    "data.label_key": "answer",
    "reward": "environment",
    "agent.tool_parser": "hermes",
    "agent.max_turns": 4,
    "generation.max_length": 96,
}
PANELS = {"train_rollouts/rewards": "right answers", "environment/tool_calls": "tool calls in an episode"}


@dataclass(frozen=True)
class Problem:
    question: str
    answer: str

    @property
    def row(self) -> dict[str, Any]:
        """The row that the environment gets."""
        return {"messages": [said("user", self.question)], "answer": self.answer}


@dataclass(frozen=True)
class Example:
    """A world of problems, and how to train in it."""

    name: str
    description: str
    problem: Callable[[random.Random], Problem]
    solution: Callable[[random.Random, Problem], list[Message]]
    """An attempt at a problem for SFT, often a bad one: the messages that follow the question."""
    conversations: int
    """Number of attempts that SFT reads."""
    steps: int
    actor: dict[str, Any]
    """Settings in addition to `ACTOR`: what the policy talks with, and the size of a step."""
    beside: Sequence[Program] = ()
    """Programs that run while it trains."""


def main(example: Example) -> None:
    parser = argparse.ArgumentParser(description=example.description)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=example.steps, help="steps of training with the environment")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "outputs" / example.name)
    arguments = parser.parse_args()
    output_dir = arguments.output_dir.resolve()
    run_example(lambda pipeline: learn(pipeline, example, output_dir, arguments.seed, arguments.steps), output_dir)


def learn(pipeline: Pipeline, example: Example, output_dir: Path, seed: int, steps: int) -> None:
    """All stages; everything is written below ``output_dir``."""
    started = time.monotonic()
    data, sft, actor = output_dir / "data", output_dir / "sft", output_dir / "actor"
    make_data(example, data, seed)

    say("reading attempts at problems (SFT)")
    files = {"data.train_path": data / "attempts.jsonl", "run.output_dir": sft, "model.path": data / "base"}
    say(f"  {train(pipeline, 'sft', {**SFT, 'run.seed': seed, **files}):.0f} s")
    say("training with the environment")
    pipeline.start(*example.beside)
    settings = {
        **ACTOR, **example.actor, "run.seed": seed, "model.path": sft / "export",
        "data.train_path": data / "problems.jsonl", "data.val_path": data / "held_out.jsonl",
        "algorithm.max_steps": steps, "algorithm.val_check_interval": steps, "checkpoint.save_interval": steps,
    }  # fmt: skip
    say(f"  {train_with_environment(pipeline, settings, actor):.0f} s")
    report(example, output_dir, seed, time.monotonic() - started)


def make_data(example: Example, folder: Path, seed: int) -> None:
    """Write attempts for SFT, problems for training, other problems that are held out, and a model to start from."""
    rng = random.Random(seed)
    held_out = {problem.question: problem for problem in (example.problem(rng) for _ in range(HELD_OUT))}
    known = [
        each for each in (example.problem(rng) for _ in range(example.conversations)) if each.question not in held_out
    ]
    attempts = [[said("user", each.question), *example.solution(rng, each)] for each in known]
    folder.mkdir(parents=True)
    write_jsonl(folder / "attempts.jsonl", ({"messages": each} for each in attempts))
    write_jsonl(folder / "problems.jsonl", (each.row for each in known))
    write_jsonl(folder / "held_out.jsonl", (each.row for each in held_out.values()))
    make_model(folder / "base", attempts)


def report(example: Example, output_dir: Path, seed: int, seconds: float) -> None:
    """Write summary.json and curves.png; print a table, and episodes from before and after."""
    rows = read_metrics(output_dir / "actor" / "metrics.jsonl")
    judged = [row for row in rows if "val_rollouts/rewards" in row]
    before, after = judged[0], judged[-1]
    summary = {"seed": seed}
    for name, key in {"right": "val_rollouts/rewards", "tool_calls": "val_rollouts/environment/tool_calls"}.items():
        summary |= {f"{name}_before": before[key], f"{name}_after": after[key]}
    summary["seconds"] = seconds
    (output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    title = f"{example.name}: GRPO with an environment"
    plot_curves({"": [rows]}, output_dir / "curves.png", title=title, panels=PANELS)

    table = Table(title="Held-out problems")
    for column in ("", "before", "after"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("right answers", f"{summary['right_before']:.3f}", f"{summary['right_after']:.3f}")
    table.add_row(
        "tool calls in an episode", f"{summary['tool_calls_before']:.2f}", f"{summary['tool_calls_after']:.2f}"
    )
    console.print(table)
    episodes = Table("first step", "last step", title="Episodes of training", show_lines=True)
    for texts in zip(*(episodes_of(output_dir, place) for place in (0, -1)), strict=True):
        episodes.add_row(*texts)
    console.print(episodes)
    say(f"written: {output_dir / 'summary.json'}, {output_dir / 'curves.png'}")


def episodes_of(output_dir: Path, place: int) -> list[str]:
    """Two episodes of the step at ``place`` in the run, as text."""
    tokenizer = AutoTokenizer.from_pretrained(output_dir / "sft" / "export")
    tokens = pq.read_table(sample_files(output_dir / "actor" / "rollouts")[place].path, columns=["step", "tokens"])
    step = tokens["step"][place].as_py()
    found = [row["tokens"] for row in tokens.to_pylist() if row["step"] == step]
    return [tokenizer.decode(found[number]).strip() for number in (0, len(found) // 2)]
