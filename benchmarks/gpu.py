"""Runs every stage on one GPU, and measures its memory and seconds, and how far sampler and trainer are apart.

    .venv-actor/bin/python benchmarks/gpu.py [--only kernels grpo] [--output report.md]

Takes some 25 minutes on one GPU of 24 GiB or more, half of them for turns (docs/gpu-checklist.md), and needs nothing but
`make envs`: the model is a Qwen2 of 0.36 G parameters with random weights. Prints a Markdown table as it goes; a check that
fails prints the end of its log, and the others go on.
"""

import argparse
import json
import shutil
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, islice, pairwise
from pathlib import Path
from random import Random

import torch
from models import PROMPTS, beginnings, pseudo_word_tokenizer, qwen2_config, sentence
from processes import ROOT, critic_server, run, run_actor
from transformers import AutoModelForSequenceClassification, Qwen2Config, Qwen2ForCausalLM

from nemo_style_rlhf.launch.local import ProgramFailed
from nemo_style_rlhf.launch.program import trainer

SHAPE = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
         "num_key_value_heads": 2, "max_position_embeddings": 4096}  # fmt: skip
SEEN = "model.layers.3.mlp.down_proj.weight"
"""The weights whose first update is compared."""
STEPS, SAMPLES, GROUP, LENGTH = 4, 256, 8, 256
LOG_LINES = 25
SHOWN = {
    "gap mean": "train_rollouts/sampler_logprob_gap_mean",
    "gap max": "train_rollouts/sampler_logprob_gap_max",
    "step s": "timers/step",
    "generate s": "timers/generate",
    "log-probabilities s": "timers/logprobs",
    "update s": "timers/actor_update",
    "transfer s": "timers/weight_transfer",
    "probe gap": "train_rollouts/transfer_probe_gap",
    "actor GiB": "memory/actor_cuda_peak_gib",
    "critic GiB": "memory/critic_cuda_peak_gib",
}
Row = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=sorted(CHECKS), default=list(CHECKS))
    parser.add_argument("--work-dir", type=Path, default=ROOT / "outputs" / "benchmarks" / "gpu")
    parser.add_argument("--output", type=Path, help="also write the table here, after every check")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no GPU")
    device = torch.cuda.get_device_properties(0)
    lines = [
        f"{device.name}, {device.total_memory / 2**30:.0f} GiB, torch {torch.__version__}", "",
        "| check | | seconds | figures |", "|---|---|---|---|",
    ]  # fmt: skip
    print("\n".join(lines), flush=True)
    make_models(arguments.work_dir / "models")
    failed = False
    for name in arguments.only:
        shutil.rmtree(arguments.work_dir / name, ignore_errors=True)
        started, outcome, figures = time.monotonic(), "passed", ""
        try:
            row = CHECKS[name](arguments.work_dir / "models", arguments.work_dir / name)
            figures = ", ".join(f"{key} {value:.4g}" for key, value in row.items())
        except (ProgramFailed, AssertionError, OSError, RuntimeError) as error:
            failed, outcome = True, f"**{type(error).__name__}**"
            traceback.print_exc()
            show_logs(arguments.work_dir / name)
        lines.append(f"| {name} | {outcome} | {time.monotonic() - started:.0f} | {figures} |")
        print(lines[-1], flush=True)
        if arguments.output:
            arguments.output.write_text("\n".join(lines) + "\n")
    sys.exit(failed)


def show_logs(folder: Path) -> None:
    for log in sorted(folder.rglob("*.log")):
        print(f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-LOG_LINES:], sep="\n", file=sys.stderr)


def make_models(folder: Path) -> None:
    if (folder / "prompts.jsonl").exists():
        return
    rng = Random(0)
    tokenizer = pseudo_word_tokenizer(rng)
    torch.manual_seed(0)
    smaller = qwen2_config(tokenizer).to_dict()
    del smaller["layer_types"]
    model = Qwen2ForCausalLM(Qwen2Config(**{**smaller, **SHAPE})).to(torch.bfloat16)
    model.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    reward = AutoModelForSequenceClassification.from_pretrained(folder / "policy", num_labels=1, dtype="auto")
    reward.save_pretrained(folder / "reward")
    tokenizer.save_pretrained(folder / "reward")
    texts = list(islice(beginnings((sentence(rng) for _ in count()), tokenizer), PROMPTS))
    (folder / "sft.jsonl").write_text(
        "".join(json.dumps({"prompt": text, "response": other}) + "\n" for text, other in pairwise(texts))
    )
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


def kernels(models: Path, folder: Path) -> Row:
    """Log-probabilities and gradients in bf16, sequences packed for the variable-length kernel, beside fp32, one by one."""
    from nemo_style_rlhf import parts as nsr

    device = nsr.setup(nsr.RunConfig(seed=1))
    rng = Random(1)
    lengths = [rng.randrange(20, 1500) for _ in range(24)]
    tokens = torch.tensor([rng.randrange(3, 8000) for _ in range(sum(lengths))])
    mask = torch.ones(len(tokens))
    mask[torch.tensor(lengths).cumsum(0) - 1] = 0
    found: dict[str, tuple[torch.Tensor, torch.Tensor, float, float]] = {}
    for name, dtype, packing in (
        ("exact", "float32", False),
        ("padded", "bfloat16", False),
        ("packed", "bfloat16", True),
    ):
        model = nsr.ModelConfig(path=str(models / "policy"), dtype=dtype, packing=packing)
        config = nsr.EngineConfig(optim=nsr.OptimizerConfig(lr=1e-2))  # bf16 would round smaller steps away
        engine = nsr.Engine(nsr.PolicyModel(nsr.load_causal_lm(model)), config, device=device)
        for _ in range(2):  # the second is timed
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            started = time.monotonic()
            logprobs = nsr.batch_logprobs(engine, tokens, lengths, mask, config, device, nsr.Ranks())
            torch.cuda.synchronize()
            seconds = time.monotonic() - started
        for batch, _ in nsr.micro_batch_iterator(tokens, lengths, mask, config, device, nsr.Ranks()):
            engine.backward(engine(batch.input_ids, batch.action_mask).logprobs.sum() / len(tokens))
        peak = torch.cuda.max_memory_allocated() / 2**30
        weights = dict(engine.hf_weights())[SEEN].float().cpu()
        engine.step()
        moved = (dict(engine.hf_weights())[SEEN].float().cpu() - weights).flatten()
        found[name] = (logprobs.cpu() * mask, moved, seconds, peak)
        del engine
        torch.cuda.empty_cache()
    row = {}
    for name in ("padded", "packed"):
        gap = (found[name][0] - found["exact"][0]).abs()
        row |= {f"{name} gap mean": float(gap.mean()), f"{name} gap max": float(gap.max()), f"{name} s": found[name][2]}
        row[f"{name} peak GiB"] = found[name][3]
        row[f"{name} update cosine"] = float(torch.cosine_similarity(found[name][1], found["exact"][1], 0))
    assert row["packed gap mean"] < 2 * row["padded gap mean"] + 1e-3, row
    return row


def grpo(*overrides: str) -> Callable[[Path, Path], Row]:
    def check(models: Path, folder: Path) -> Row:
        child, lines = run_actor(folder, [*actor(models), *ALONE, *overrides])
        return figures_of(lines) | {"RSS GiB": child.peak_rss_bytes / 2**30}

    return check


def ppo(*overrides: str) -> Callable[[Path, Path], Row]:
    def check(models: Path, folder: Path) -> Row:
        server = [f"model.path={models / 'reward'}"]
        with critic_server(folder / "critic", server) as critic:
            _, lines = run_actor(folder / "actor", [*actor(models), *overrides], critic)
        return figures_of(lines)

    return check


def turns(*overrides: str, in_turns: Sequence[str] = (), critic: bool = False) -> Callable[[Path, Path], Row]:
    """The same run with all parts on the device and in turns: the device's peaks, and whether the exports have the same bits."""

    def check(models: Path, folder: Path) -> Row:
        row: Row = {}
        exports = []
        for name, more in (("together", ()), ("turns", ("placement.share=turns", *in_turns))):
            with device_peak() as peak:
                run_check = (ppo if critic else grpo)(*overrides, *more)
                found = run_check(models, folder / name)
            metrics = next((folder / name).rglob("metrics.jsonl"))
            exports.append([each.read_bytes() for each in sorted((metrics.parent / "export").glob("*.safetensors"))])
            row |= {f"{name} device GiB": max(peak) / 2**30}
            row |= {f"{name} {key}": found[key] for key in ("step s", "gap mean", "probe gap")}
        assert exports[0], "nothing was exported"
        handovers = [json.loads(line).get("placement/handover_seconds", 0.0) for line in metrics.open()]
        row |= {"handovers s": statistics.median(handovers[1:]), "same bits": float(exports[0] == exports[1])}
        assert row["turns device GiB"] < row["together device GiB"], row
        return row

    return check


@contextmanager
def device_peak() -> Iterator[list[int]]:
    """Collect the bytes in use on the device, by whatever process, ten times a second."""
    seen, ended = [0], threading.Event()

    def look() -> None:
        while not ended.wait(0.1):
            free, total = torch.cuda.mem_get_info()
            seen.append(total - free)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def sft(models: Path, folder: Path) -> Row:
    program = trainer(
        "train_sft", folder, f"model.path={models / 'policy'}", f"data.train_path={models / 'sft.jsonl'}",
        f"trainer.max_steps={STEPS}", "trainer.log_interval=1", "model.packing=true",
    )  # fmt: skip
    run(program, folder / "sft.log")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {"loss": lines[-1].get("train/loss", float("nan"))}


def actor(models: Path) -> list[str]:
    return [
        f"model.path={models / 'policy'}", f"data.train_path={models / 'prompts.jsonl'}", f"generation.max_length={LENGTH}",
        "generation.ignore_eos=true", "generation.gpu_memory_utilization=0.3", f"algorithm.num_rollout_samples={SAMPLES}",
        "algorithm.mini_batches=4", f"algorithm.max_steps={STEPS}",
        "checkpoint.save_interval=-1",
    ]  # fmt: skip


ALONE = [
    "algorithm=grpo", f"algorithm.samples_per_prompt={GROUP}", "reward=function",
    "reward.function.path=benchmarks/distinct_words.py",
]  # fmt: skip


def figures_of(lines: list[Row]) -> Row:
    """The median of the steps after the first, and of gaps the largest of all."""
    row = {}
    for name, key in SHOWN.items():
        values = [line[key] for line in lines if line.get(key) is not None]
        if values:
            row[name] = max(values) if "GiB" in name or "gap" in name else statistics.median(values[1:] or values)
    return row


CHECKS: dict[str, Callable[[Path, Path], Row]] = {
    "kernels": kernels,
    "grpo": grpo(),
    "ppo": ppo(),
    "graphs": grpo("generation.enforce_eager=false"),
    "small": grpo("model=large", "engine.offload_optimizer_states=true"),
    "zero3": grpo("engine=zero3"),
    "offload": grpo("engine.offload_optimizer=true", "run.num_threads=8"),
    "lora": grpo("model.lora.rank=16"),
    "packed": grpo("model.packing=true"),
    "turns": turns(),
    "turns_zero3": turns("engine=zero3"),
    "turns_lora": turns("model.lora.rank=16"),
    "turns_engine": turns(in_turns=["generation.engines.count=1"]),
    "turns_ppo": turns(critic=True),
    "sft": sft,
}

if __name__ == "__main__":
    main()
