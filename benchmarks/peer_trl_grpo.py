"""The peer: TRL's GRPOTrainer on the same policy, prompts and sizes; prints one JSON line with the seconds of every step.

    .venv-trl-grpo/bin/python benchmarks/peer_trl_grpo.py --models outputs/benchmarks/models/19m

A step is a rollout and its optimizer steps. The settings are those with which it is fastest on a CPU: weights in bf16, eager
attention, fused AdamW, no reference model (beta 0), no gradient checkpointing, one micro-batch per optimizer step, and
(`--compile`) torch.compile.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, required=True, help="folder made by benchmarks/models.py")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--response-length", type=int, default=64)
    parser.add_argument("--mini-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="torch.compile the trained model")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = StepClock(arguments.mini_batches)
    with tempfile.TemporaryDirectory() as output_dir:
        build_trainer(arguments, output_dir, clock).train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": clock.seconds[arguments.warmup :], "phases": {}, "peak_rss_bytes": peak}))


class StepClock(TrainerCallback):
    """Seconds of every rollout with its optimizer steps."""

    def __init__(self, optimizer_steps: int) -> None:
        self.seconds: list[float] = []
        self._optimizer_steps = optimizer_steps
        self._began = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, _: Any, state: Any, *args: Any, **kwargs: Any) -> None:
        if state.global_step % self._optimizer_steps == 0:
            now = time.perf_counter()
            self.seconds.append(now - self._began)
            self._began = now


def distinct_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A cheap reward, since only the trainer is measured."""
    return [float(len(set(ids))) for ids in completion_ids]


def build_trainer(arguments: argparse.Namespace, output_dir: str, clock: StepClock) -> GRPOTrainer:
    tokenizer = AutoTokenizer.from_pretrained(arguments.models / "policy", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        arguments.models / "policy", dtype=getattr(torch, arguments.dtype), attn_implementation="eager"
    )
    rows = (arguments.models / "prompts.jsonl").read_text().splitlines()
    config = GRPOConfig(
        output_dir=output_dir,
        use_cpu=True,
        bf16=False,  # the weights are bf16 already
        gradient_checkpointing=False,
        per_device_train_batch_size=arguments.samples // arguments.mini_batches,
        gradient_accumulation_steps=1,
        steps_per_generation=arguments.mini_batches,
        num_generations=arguments.group,
        num_iterations=1,
        max_completion_length=arguments.response_length,
        generation_kwargs={"min_new_tokens": arguments.response_length},  # end-of-text is ignored
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-6,
        optim="adamw_torch_fused",
        max_steps=arguments.mini_batches * (arguments.warmup + arguments.steps),
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        torch_compile=arguments.compile,
    )
    return GRPOTrainer(
        model=model,
        args=config,
        processing_class=tokenizer,
        reward_funcs=distinct_tokens,
        train_dataset=Dataset.from_dict({"prompt": [json.loads(row)["prompt"] for row in rows]}),
        callbacks=[clock],
    )


if __name__ == "__main__":
    main()
