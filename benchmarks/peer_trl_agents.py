"""The peer: TRL's GRPOTrainer with a calculator as its environment; prints one JSON line with the seconds of every step.

    .venv-trl-grpo/bin/python benchmarks/peer_trl_agents.py --model MODEL --rows ROWS

Settings are those with which it is fastest here: transformers' generation, eager attention, fused AdamW, no reference model.
"""

import argparse
import json
import resource
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peer_trl_grpo import StepClock
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

MOST_CALLS = 3
"""Rounds of tool calls, so that an episode has at most four turns."""


class Calculator:
    def reset(self, **row: Any) -> None:
        pass

    def calculator(self, expression: str) -> str:
        """
        Computes with whole numbers.

        Args:
            expression: such as 2 * 3 + 4

        Returns:
            the value
        """
        return str(eval(expression, {"__builtins__": {}}))


def right(completions: list[list[dict[str, Any]]], answer: list[str], **_: Any) -> list[float]:
    return [float((each[-1].get("content") or "").strip() == label) for each, label in zip(completions, answer)]


class Counts(StepClock):
    """Also the mean number of tool calls in an episode, of every logged step."""

    def __init__(self, optimizer_steps: int) -> None:
        super().__init__(optimizer_steps)
        self.calls: list[float] = []

    def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "tools/call_frequency" in logs:
            self.calls.append(logs["tools/call_frequency"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines with messages and answer")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--mini-batches", type=int, default=2)
    parser.add_argument("--max-length", type=int, default=96)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = Counts(arguments.mini_batches)
    with tempfile.TemporaryDirectory() as output_dir:
        build_trainer(arguments, output_dir, clock).train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": clock.seconds[arguments.warmup :], "calls": clock.calls, "peak_rss_bytes": peak}))


def build_trainer(arguments: argparse.Namespace, output_dir: str, clock: Counts) -> GRPOTrainer:
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    tokenizer.response_template = qwen3_template  # the tool calls of Hermes and Qwen
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32, attn_implementation="eager")
    rows = [json.loads(line) for line in arguments.rows.read_text().splitlines()]
    config = GRPOConfig(
        output_dir=output_dir,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=arguments.samples // arguments.mini_batches,
        gradient_accumulation_steps=1,
        steps_per_generation=arguments.mini_batches,
        num_generations=arguments.group,
        num_iterations=1,
        max_completion_length=arguments.max_length,
        max_tool_calling_iterations=MOST_CALLS,
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-6,
        optim="adamw_torch_fused",
        max_steps=arguments.mini_batches * (arguments.warmup + arguments.steps),
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )
    return GRPOTrainer(
        model=model,
        args=config,
        processing_class=tokenizer,
        reward_funcs=right,
        train_dataset=Dataset.from_dict(
            {"prompt": [row["messages"] for row in rows], "answer": [row["answer"] for row in rows]}
        ),
        environment_factory=Calculator,
        callbacks=[clock],
    )


if __name__ == "__main__":
    main()
