"""The peer: TRL's PPOTrainer on the same models, prompts and sizes; prints one JSON line with the seconds of every step.

    .venv-trl/bin/python benchmarks/peer_trl_ppo.py --models outputs/benchmarks/models/19m

The settings are those with which it is fastest here, see docs/benchmarks.md: weights in bf16 (PPOTrainer ignores
TrainingArguments.bf16 under transformers 5, and autocast is slower), one batch for generation and scoring, one micro-batch
per mini-batch, fused AdamW, no gradient checkpointing, no evaluation, no checkpoint.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, required=True, help="folder made by benchmarks/models.py")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--attention", default="eager", choices=["eager", "sdpa"])
    parser.add_argument("--compile", action="store_true", help="torch.compile the trained models")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--response-length", type=int, default=64)
    parser.add_argument("--mini-batches", type=int, default=4)
    parser.add_argument("--rollout-batch", type=int, default=128, help="samples per forward outside of training")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.compile:  # read by the Accelerator that PPOTrainer makes for itself
        os.environ["ACCELERATE_DYNAMO_BACKEND"] = "inductor"
    clock = PhaseClock()
    with tempfile.TemporaryDirectory() as output_dir:
        build_trainer(arguments, output_dir, clock).train()
    clock.forget(arguments.warmup)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": clock.steps, "phases": clock.phases, "peak_rss_bytes": peak}))


class PhaseClock(TrainerCallback):
    """Measures seconds of every step and of its three phases; two of PPOTrainer's own functions mark the borders."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.phases: dict[str, list[float]] = {"generate": [], "score": [], "update": []}
        self._step_began = self._generated = self._update_began = 0.0
        ppo_trainer.batch_generation = self._after(ppo_trainer.batch_generation, self._mark_generated)
        ppo_trainer.forward = self._before(ppo_trainer.forward, self._mark_update)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._step_began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        self.steps.append(now - self._step_began)
        self.phases["generate"].append(self._generated - self._step_began)
        self.phases["score"].append(self._update_began - self._generated)
        self.phases["update"].append(now - self._update_began)
        self._step_began, self._update_began = now, 0.0

    def forget(self, warmup: int) -> None:
        for seconds in (self.steps, *self.phases.values()):
            del seconds[:warmup]

    def _mark_generated(self) -> None:
        self._generated = time.perf_counter()

    def _mark_update(self) -> None:
        """The first forward with a gradient begins the update."""
        if torch.is_grad_enabled() and not self._update_began:
            self._update_began = time.perf_counter()

    @staticmethod
    def _after(function: Callable[..., Any], mark: Callable[[], None]) -> Callable[..., Any]:
        def marked(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            mark()
            return result

        return marked

    @staticmethod
    def _before(function: Callable[..., Any], mark: Callable[[], None]) -> Callable[..., Any]:
        def marked(*args: Any, **kwargs: Any) -> Any:
            mark()
            return function(*args, **kwargs)

        return marked


def build_trainer(arguments: argparse.Namespace, output_dir: str, clock: PhaseClock) -> PPOTrainer:
    tokenizer = AutoTokenizer.from_pretrained(arguments.models / "policy", padding_side="left")

    def load(auto_class: Any, name: str, **kwargs: Any) -> Any:
        return auto_class.from_pretrained(
            arguments.models / name,
            dtype=getattr(torch, arguments.dtype),
            attn_implementation=arguments.attention,
            **kwargs,
        )

    rows = (arguments.models / "prompts.jsonl").read_text().splitlines()
    prompts = [tokenizer(json.loads(row)["prompt"])["input_ids"] for row in rows]
    config = PPOConfig(
        output_dir=output_dir,
        use_cpu=True,
        bf16=False,  # the weights are bf16 already
        gradient_checkpointing=False,
        # PPOTrainer's batch is per_device_train_batch_size x gradient_accumulation_steps, and its optimizer steps once per
        # accumulation. These sizes give num_mini_batches optimizer steps.
        per_device_train_batch_size=arguments.samples,
        gradient_accumulation_steps=1,
        num_mini_batches=arguments.mini_batches,
        local_rollout_forward_batch_size=arguments.rollout_batch,
        num_ppo_epochs=1,
        total_episodes=arguments.samples * (arguments.warmup + arguments.steps),
        response_length=arguments.response_length,
        stop_token=None,  # end-of-text is ignored
        temperature=1.0,
        kl_coef=0.01,
        learning_rate=1e-6,
        optim="adamw_torch_fused",
        num_sample_generations=0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=load(AutoModelForCausalLM, "policy"),
        ref_model=load(AutoModelForCausalLM, "policy"),
        reward_model=load(AutoModelForSequenceClassification, "reward", num_labels=1),
        value_model=load(AutoModelForSequenceClassification, "reward", num_labels=1),
        train_dataset=Dataset.from_dict({"input_ids": prompts}),
        callbacks=[clock],
    )


if __name__ == "__main__":
    main()
