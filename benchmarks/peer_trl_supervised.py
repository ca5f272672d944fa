"""The peer: TRL's SFTTrainer or DPOTrainer on the same model, rows and sizes; prints one JSON line of seconds per step.

    .venv-trl-grpo/bin/python benchmarks/peer_trl_supervised.py --stage sft --model MODEL --rows ROWS

Fastest settings on a CPU: bf16 autocast over fp32 weights, as ours, eager attention, fused AdamW, no checkpointing.
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
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", choices=["sft", "dpo"], required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--micro-batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = StepClock(1)
    with tempfile.TemporaryDirectory() as output_dir:
        build_trainer(arguments, output_dir, clock).train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": clock.seconds[arguments.warmup :], "peak_rss_bytes": peak}))


def build_trainer(arguments: argparse.Namespace, output_dir: str, clock: StepClock) -> Any:
    config_class, trainer_class = {"sft": (SFTConfig, SFTTrainer), "dpo": (DPOConfig, DPOTrainer)}[arguments.stage]
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32, attn_implementation="eager")
    rows = [json.loads(line) for line in arguments.rows.read_text().splitlines()]
    config = config_class(
        output_dir=output_dir,
        use_cpu=True,
        bf16=True,
        gradient_checkpointing=False,
        per_device_train_batch_size=arguments.micro_batch_size,
        gradient_accumulation_steps=arguments.batch_size // arguments.micro_batch_size,
        max_steps=arguments.warmup + arguments.steps,
        optim="adamw_torch_fused",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return trainer_class(
        model=model,
        args=config,
        processing_class=AutoTokenizer.from_pretrained(arguments.model),
        train_dataset=Dataset.from_list(rows),
        callbacks=[clock],
    )


if __name__ == "__main__":
    main()
