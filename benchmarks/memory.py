"""The memory preflight beside what real runs hold: actor and critic server, five shapes.

    .venv-actor/bin/python benchmarks/memory.py

Prints a Markdown table: predicted and measured peak of each process, GiB above its imports. A run takes three PPO steps, with a
checkpoint before the first and after the last. Shapes of more than 200 M parameters meet a tiny partner, so that one of the two
processes is large at a time.
"""

import argparse
import json
import random
import shutil
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path

import torch
from models import beginnings, pseudo_word_tokenizer, sentence
from processes import ROOT, critic_server, run_actor, run_json
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from nemo_style_rlhf.launch.composition import compose
from nemo_style_rlhf.launch.program import ACTOR_PYTHON, SERVER_PYTHON
from nemo_style_rlhf.planning.phases import GIB
from nemo_style_rlhf.planning.run import Planner
from nemo_style_rlhf.schema.base import build
from nemo_style_rlhf.schema.plan import PlanConfig

PROMPTS = 64
APART = 200e6
"""Number of parameters from which the two processes are measured one after the other."""
IMPORTS = {
    "actor": (
        ACTOR_PYTHON,
        "nemo_style_rlhf.ppo.run, vllm.entrypoints.llm, vllm.v1.engine.core, vllm.v1.worker.cpu_worker, "
        "vllm.v1.attention.backends.cpu_attn, vllm.model_executor.models.qwen2, vllm.model_executor.models.llama, "
        "transformers.models.qwen2.modeling_qwen2, transformers.models.llama.modeling_llama, peft",
    ),
    "critic server": (
        SERVER_PYTHON,
        "nemo_style_rlhf.critic_service.process, nemo_style_rlhf.critic_service.critic_server, "
        "transformers.models.qwen2.modeling_qwen2, transformers.models.llama.modeling_llama, peft",
    ),
}
QWEN, LLAMA = (Qwen2Config, Qwen2ForCausalLM), (LlamaConfig, LlamaForCausalLM)


@dataclass
class Shape:
    name: str
    family: tuple
    size: dict[str, object]
    both: tuple[str, ...] = ()
    """Overrides of both processes."""
    response: int = 32


def size(
    vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, *, tied: bool
) -> dict[str, object]:
    return {
        "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "tie_word_embeddings": tied,
        "max_position_embeddings": 1024,
    }  # fmt: skip


SHAPES = [
    Shape("Qwen2, tied, bf16, ZeRO-1", QWEN, size(16384, 640, 2048, 10, 10, 10, tied=True), response=48),
    Shape("Qwen2, bf16, ZeRO-2", QWEN, size(16384, 768, 2304, 10, 12, 4, tied=False), ("engine.zero_stage=2",)),
    Shape("Qwen2, bf16, without ZeRO", QWEN, size(16384, 768, 2304, 10, 12, 4, tied=False), ("engine.zero_stage=0",)),
    Shape("Llama, fp32, ZeRO-1", LLAMA, size(8192, 576, 1536, 12, 9, 3, tied=True), ("model.dtype=float32",)),
    Shape(
        "Llama, bf16, LoRA, recomputed activations", LLAMA, size(32768, 1024, 2816, 10, 16, 8, tied=False),
        ("model.lora.rank=16", "model.gradient_checkpointing=true"), response=48,
    ),
    Shape("Qwen2, tied, bf16, ZeRO-1", QWEN, size(16384, 1024, 4096, 19, 16, 8, tied=True)),
]  # fmt: skip
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, default=ROOT / "outputs" / "benchmarks" / "memory")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of shapes, from 1")
    arguments = parser.parse_args()
    baselines = {name: imported(name, arguments.work_dir) for name in IMPORTS}
    print("imports: " + ", ".join(f"{name} {gib(bytes_)} GiB" for name, bytes_ in baselines.items()) + "\n", flush=True)
    print(
        "| shape | parameters | process | predicted | measured | predicted / measured |\n|---|---|---|---|---|---|",
        flush=True,
    )
    for number, shape in enumerate(SHAPES, start=1):
        if arguments.only and number not in arguments.only:
            continue
        folder = arguments.work_dir / str(number)
        elements = make(shape, folder)
        for process, (predicted, peak) in measure(shape, folder, apart=elements["actor"] > APART).items():
            measured = peak - baselines[process]
            print(
                f"| {shape.name} | {elements[process] / 1e6:.0f} M | {process} | {gib(predicted)} | {gib(measured)} | "
                f"{predicted / measured:.2f} |",
                flush=True,
            )
        shutil.rmtree(folder)


def gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def imported(process: str, work_dir: Path) -> int:
    """VmHWM of a process that only imports, in bytes."""
    python, modules = IMPORTS[process]
    code = (
        "from nemo_style_rlhf.launch import bootstrap; from nemo_style_rlhf.schema.common import RunConfig; "
        f"bootstrap.setup(RunConfig(output_dir='')); import {modules}; import json, resource; "
        "print(json.dumps({'kib': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}))"
    )
    return int(run_json([python, "-c", code], work_dir / "imports.log")["kib"]) * 1024


def make(shape: Shape, folder: Path) -> dict[str, int]:
    """Make models and prompts of ``shape``, and a tiny partner for each side; returns the numbers of parameters of both."""
    rng = random.Random(0)
    torch.manual_seed(0)
    tokenizer = pseudo_word_tokenizer(rng)
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    dtype = torch.float32 if "model.dtype=float32" in shape.both else torch.bfloat16
    config, causal = shape.family
    elements = {}
    for name, changes in (("large", {}), ("tiny", TINY)):
        described = config(**{**shape.size, **changes, **special})
        policy = causal(described).to(dtype)
        elements.setdefault("actor", policy.num_parameters())
        policy.save_pretrained(folder / name / "policy")
        del policy
        described.num_labels = 1
        reward = AutoModelForSequenceClassification.from_config(described).to(dtype)
        elements.setdefault("critic server", reward.num_parameters())
        reward.save_pretrained(folder / name / "reward")
        del reward
        for kind in ("policy", "reward"):
            tokenizer.save_pretrained(folder / name / kind)
    rows = islice(beginnings((sentence(rng) for _ in count()), tokenizer), PROMPTS)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    return elements


def measure(shape: Shape, folder: Path, *, apart: bool) -> dict[str, tuple[int, int]]:
    """Predicted bytes above the imports, and VmHWM, of each process."""
    actor = [
        f"data.train_path={folder / 'prompts.jsonl'}", f"generation.max_length={shape.response}", "generation.ignore_eos=true",
        "generation.kv_cache_gib=0.25", "algorithm.num_rollout_samples=32", "algorithm.mini_batches=2", *shape.both,
    ]  # fmt: skip
    plan = [
        *actor, f"model.path={folder / 'large' / 'policy'}", f"critic.model.path={folder / 'large' / 'reward'}",
        *(f"critic.{override}" for override in shape.both), "run.device=cpu",
    ]  # fmt: skip
    config = build(PlanConfig, compose("plan", plan))
    predicted = {each.name: each.peak.total - each.peak.parts["libraries"] for each in Planner(config).plan(config)}
    run = partial(run_pair, folder, [*actor, "algorithm.max_steps=3"], list(shape.both))
    if apart:
        peaks = {"actor": run("large", "tiny")["actor"], "critic server": run("tiny", "large")["critic server"]}
    else:
        peaks = run("large", "large")
    return {name: (predicted[name], peaks[name]) for name in predicted}


def run_pair(folder: Path, actor: list[str], critic: list[str], policy: str, reward: str) -> dict[str, int]:
    """VmHWM of both processes of a real run, in bytes."""
    directory = folder / "run"
    shutil.rmtree(directory, ignore_errors=True)
    with critic_server(directory / "critic", [f"model.path={folder / reward / 'reward'}", *critic]) as server:
        child, _ = run_actor(directory / "actor", [f"model.path={folder / policy / 'policy'}", *actor], server)
        server[0].sample()
    return {"actor": child.own_peak_rss_bytes, "critic server": server[0].own_peak_rss_bytes}


if __name__ == "__main__":
    main()
