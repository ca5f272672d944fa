"""One GPU, one command, one table in 15 minutes: does everything run, do bits repeat, what does it hold, how long does it take?

    .venv-actor/bin/python benchmarks/gpu.py [--output report.md] [--only ppo_0.5b bits_sync] [--seconds 840]

Needs nothing but `make envs`, and a card of 40 GiB or more: models are Qwen2s with random weights. The checks come in the order
of their worth, and end with the time that is given; ``--rest`` goes on with what has not run yet. Whatever hangs, or takes too
long, is ended, and the figures of the steps that it made are kept. The logs are in ``report.tgz`` beside the table. With
``--rehearse`` the checks run on a CPU, with tiny models.
"""

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count, groupby, islice
from pathlib import Path
from random import Random
from typing import Any

import gpu_checks
import torch
from gpu_checks import PROGRAMS, Attempt, Check, Figures, Memory, Size, compared, figures_of, last_lines, planned
from models import PROMPT_TOKENS, PROMPTS, beginnings, pseudo_word_tokenizer, qwen2_config, sentence
from processes import ROOT, Child
from transformers import AutoModelForSequenceClassification, Qwen2Config, Qwen2ForCausalLM

from nemo_style_rlhf.launch.gpu_host import driver_release
from nemo_style_rlhf.launch.local import ProgramFailed
from nemo_style_rlhf.launch.program import trainer

SMALL = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
         "num_key_value_heads": 2, "max_position_embeddings": 16_896}  # fmt: skip
REAL = {"vocab_size": 151_936}
SHAPES = {
    "small": SMALL,
    "0.5b": SMALL | REAL,
    "0.6b": SMALL | REAL | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.5b": SMALL | REAL | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}  # fmt: skip
"""small has 0.36 G parameters and a vocabulary of 8,192; the others are about Qwen2.5's and Qwen3's, with their vocabulary."""
TINY = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 16_896, "vocab_size": 8192}  # fmt: skip
FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12}
"""bf16, dense, by data sheets: of the card whose name holds the key."""
GROUP = 8
LONG = (128, 8192, 16_384)
"""Tokens of the rows of SFT; the first length is for rehearsals."""
SFT_TOKENS = 8 * 8192
"""Of an optimizer step."""
HELD_GIB = 1.0
"""A critic server of 1.5 G parameters that sleeps holds less: its context, and what is never given back."""
LANES = 3
"""Checks that run beside each other."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), metavar="CHECK", help=", ".join(CHECKS))
    parser.add_argument("--seconds", type=float, default=840.0, help="time for all checks")
    parser.add_argument("--rest", action="store_true", help="leave out what --work-dir has results of")
    parser.add_argument("--output", type=Path, default=ROOT / "report.md", help="the table, written after every check")
    parser.add_argument("--work-dir", type=Path, default=ROOT / "outputs" / "benchmarks" / "gpu")
    parser.add_argument("--without-vllm", action="store_true", help="transformers samples, 16 tokens")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny models")
    parser.add_argument("--make", choices=list(SHAPES), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.make:
        make_models(given.work_dir / "models" / given.make, TINY if given.rehearse else SHAPES[given.make])
        return 0
    if not given.rehearse and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no GPU (--rehearse needs none)")
    return Bench(given).run()


class Bench:
    """All checks, their results so far, and the time that is left."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._size = Size()
        if given.rehearse:
            cpu = ("run.device=cpu", "run.num_threads=1")
            self._size = Size(samples=16, length=8, everywhere=cpu, patience=4.0)
        if given.without_vllm:
            self._size.length = min(self._size.length, 16)
            self._size.sampling = ("generation=hf",)
        self._results = given.work_dir / "results.jsonl"
        self._memory, self._lock = Memory(), threading.Lock()
        self._makers: dict[str, subprocess.Popen[bytes]] = {}
        self._eager = False
        self._ends = time.monotonic() + given.seconds

    def run(self) -> int:
        given, names = self._given, self._names()
        self._results.parent.mkdir(parents=True, exist_ok=True)
        self._memory.start()
        self._prepare(CHECKS[name].models for name in names[:2])  # not all: the first check is in a hurry
        outcomes = []
        for beside, group in groupby(names, lambda name: CHECKS[name].beside):
            self._prepare(CHECKS[name].models for name in names)
            if beside:
                with ThreadPoolExecutor(LANES) as pool:
                    outcomes += list(pool.map(self._attempt, group))
                continue
            for name in group:
                outcomes.append(self._attempt(name))
                if name == "vllm" and outcomes[-1] != "passed":
                    print("vLLM does not sample: what follows would not, either (--without-vllm)", flush=True)
                    return 3
        for maker in self._makers.values():
            maker.wait()
        with tarfile.open(given.output.with_suffix(".tgz"), "w:gz") as archive:
            for pattern in ("*.log", "metrics.jsonl", "this_run.yaml"):
                for file in sorted(given.work_dir.rglob(pattern)):
                    archive.add(file, file.relative_to(given.work_dir))
        print(given.output.read_text(), flush=True)
        return int(any(outcome not in ("passed", "no time left") for outcome in outcomes))

    def _names(self) -> list[str]:
        names = self._given.only or [
            name for name, check in CHECKS.items() if not (self._given.without_vllm and check.vllm)
        ]
        if not self._given.rest:
            self._results.unlink(missing_ok=True)
            return list(names)
        known = {row["check"] for row in self._rows() if row["outcome"] != "no time left"}
        return [name for name in names if name not in known]

    def _rows(self) -> list[dict[str, Any]]:
        lines = self._results.read_text().splitlines() if self._results.exists() else []
        return list({row["check"]: row for row in map(json.loads, lines)}.values())

    def _prepare(self, shapes: Any) -> None:
        """Start to write the models that are missing."""
        more = ["--rehearse"] if self._given.rehearse else []
        for shape in {*shapes} - self._makers.keys():
            command = [sys.executable, __file__, "--work-dir", str(self._given.work_dir), *more, "--make", shape]
            self._makers[shape] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def _attempt(self, name: str) -> str:
        """Run a check, and write its result; returns the outcome."""
        started, check = time.monotonic(), CHECKS[name]
        folder, models = self._given.work_dir / name, self._given.work_dir / "models" / check.models
        row: dict[str, Any] = {"check": name, "outcome": "passed", "figures": {}, "error": ""}
        shutil.rmtree(folder, ignore_errors=True)
        if self._ends - started < 30:
            row["outcome"] = "no time left"
        else:
            self._prepare([check.models])
            self._makers[check.models].wait()
            attempt = Attempt(check, self._size, models, folder, self._ends)
            plan = None
            if check.run in (ppo, grpo) and not self._given.rehearse:
                plan = planned(check, attempt, device_gib(), folder / "plan.log")
            try:
                row["figures"] = check.run(attempt)
            except Exception as error:  # noqa: BLE001 told in the table, and the next check goes on
                row |= {"outcome": type(error).__name__, "error": str(error)[-6000:]}
                row["figures"] = figures_of(gpu_checks.lines_of(folder / "actor" / "metrics.jsonl"))
            if plan is not None:
                row["plan"] = plan_of(plan, folder / "plan.log")
            row["figures"] |= arithmetic(row["figures"], models, self._size)
        row["seconds"] = round(time.monotonic() - started, 1)
        for heavy in ("checkpoints", "export", "exports"):
            for found in folder.rglob(heavy):
                shutil.rmtree(found, ignore_errors=True)
        with self._lock:
            row["GiB"] = self._memory.take()
            with self._results.open("a") as results:
                results.write(json.dumps(row) + "\n")
            self._given.output.write_text(report(self._rows()))
            print(
                f"{name}: {row['outcome']}, {row['seconds']:.0f} s {row['figures']} {row['error'][-800:]}", flush=True
            )
        return str(row["outcome"])


# --- checks ---------------------------------------------------------------------------------------------------------


def ppo(attempt: Attempt) -> Figures:
    with attempt.critic() as (critic, where):
        return figures_of(attempt.actor(where, others=[critic]))


ALONE = (
    "algorithm=grpo", f"algorithm.samples_per_prompt={GROUP}", "reward=function",
    "reward.function.path=benchmarks/distinct_words.py",
)  # fmt: skip


def grpo(attempt: Attempt) -> Figures:
    return figures_of(attempt.actor(*ALONE))


def engine_beside(attempt: Attempt) -> Figures:
    """An engine on the trainer's card, which samples the next step while this one trains."""
    with attempt.engine():
        return figures_of(attempt.actor(*ALONE))


def sampler(attempt: Attempt) -> Figures:
    """vLLM alone: eager, with CUDA graphs, in fp32; all at once, since most of the time goes into what is compiled once."""
    device = ["--device", "cpu"] if attempt.size.everywhere else []
    command = [sys.executable, "benchmarks/gpu_sampler.py", attempt.models, "--length", attempt.size.length, *device]
    ways = {"eager": [], "graphs": ["--graphs"], "fp32": ["--dtype", "float32"]}
    attempt.quiet_s = gpu_checks.COMPILES_S
    found: Figures = {}

    def way(name: str) -> None:
        log = attempt.folder / f"{name}.log"
        try:
            found[name] = attempt.json_of([*command, *ways[name]], log)
        except Exception as error:  # noqa: BLE001 told in the figures
            found[name] = {"error": last_lines(log) or str(error)}

    with ThreadPoolExecutor(len(ways)) as pool:
        list(pool.map(way, ways))
    if "error" in found["eager"]:
        raise ProgramFailed(found["eager"]["error"])
    return {"more": found}


def turns_held(attempt: Attempt) -> Figures:
    """PPO in turns. What the critic server holds when it sleeps the first time is what a 7B model's card would lack 14 GiB of."""
    figures = ppo(attempt)
    said = (attempt.folder / "actor" / "actor.log").read_text()
    held = [float(each) for each in re.findall(r"turn of generate .*critic server ([\d.]+) GiB", said)]
    figures["critic server asleep GiB"] = max(held)
    assert not torch.cuda.is_available() or max(held) < HELD_GIB, f"the critic server held {held} GiB while it slept"
    return figures


def bits(attempt: Attempt) -> Figures:
    """Two runs of the same seed, and one that is killed after its second step and started again: have they the same bits?"""
    lines: gpu_checks.Lines = []
    for name in ("first", "second", "killed"):
        with attempt.critic(f"{name}_critic") as (critic, where):
            if "generation.engines.launch=false" not in attempt.check.overrides:
                lines = run_whole(attempt, name, where, critic)
                continue
            with attempt.engine(name):
                lines = run_whole(attempt, name, where, critic)
    parted = {
        what: compared(attempt.folder / "first", attempt.folder / other)
        for what, other in (("a second run", "second"), ("a killed one", "killed"))
    }
    figures = figures_of(lines) | {"more": {what: where or "same bits" for what, where in parted.items()}}
    assert not any(parted.values()), figures["more"]
    return figures


def run_whole(attempt: Attempt, name: str, where: str, critic: Child) -> gpu_checks.Lines:
    """One run with its export, of which each step is saved."""
    words = (where, "run.deterministic=true", "checkpoint.save_interval=1", "checkpoint.keep_last=2")
    if name == "killed":
        attempt.actor(*words, name=name, others=[critic], steps=2)
    return attempt.actor(*words, name=name, others=[critic], steps=0)


def kernels(attempt: Attempt) -> Figures:
    device = ["--device", "cpu"] if attempt.size.everywhere else []
    command = [sys.executable, "benchmarks/gpu_kernels.py", attempt.models, *device]
    return {"more": attempt.json_of(command, attempt.folder / "kernels.log")}


def sft(length: int) -> Any:
    """Rows of one length, everything recomputed, as in prime-rl's benchmarks/baselines (0.6B, one H100, full recompute)."""

    def check(attempt: Attempt) -> Figures:
        tokens, folder = LONG[0] if attempt.size.everywhere else length, attempt.folder / "actor"
        rows = max(1, SFT_TOKENS // length)
        program = trainer(
            "train_sft", folder, f"model.path={attempt.models}/policy", f"data.train_path={attempt.models}/long_{tokens}.jsonl",
            f"data.max_length={tokens}", f"trainer.batch_size={rows}", "trainer.micro_batch_size=1",
            f"trainer.max_steps={attempt.size.steps + 2}", "trainer.log_interval=1", "model.gradient_checkpointing=true",
            *attempt.size.everywhere,
        )  # fmt: skip
        log, metrics = folder / "sft.log", folder / "metrics.jsonl"
        attempt.program(program, log, metrics=metrics, steps=attempt.size.steps + 2)
        seconds = (attempt.wrote[-1] - attempt.wrote[0]) / (len(attempt.wrote) - 1)
        return {"steps": len(attempt.wrote), "step s": seconds, "tokens/s": rows * tokens / max(seconds, 1e-3)}

    return check


MICRO = ("engine.micro_batch_tokens=4096",)
SHARED = (*MICRO, "generation.kv_cache_gib=2", "generation.gpu_memory_utilization=0.1")
"""vLLM measures no memory, which others may free meanwhile, if its cache is given."""
LAG = ("algorithm.staleness=1", "correction=tis", "generation.engines.count=1", "generation.engines.launch=false")
TURNS = ("placement.share=turns", "generation.gpu_memory_utilization=0.7")
GRAPHS = ("generation.enforce_eager=false",)
VERL = ("algorithm.num_rollout_samples=256", "generation.max_length=239", "data.max_prompt_length=105")
CHECKS = {
    # Does it run?
    "vllm": Check(sampler, limit_s=150.0),
    "ppo_0.5b": Check(ppo, GRAPHS, models="0.5b", limit_s=200.0),
    "turns_ppo": Check(ppo, TURNS),
    "engine_lag1": Check(engine_beside, SHARED + LAG),
    # Do bits repeat?
    "bits_sync": Check(bits, (*TURNS, *MICRO, "generation.engines.count=1"), ("run.deterministic=true",), limit_s=300.0),
    "bits_lag1": Check(bits, SHARED + LAG, (*MICRO, "run.deterministic=true"), limit_s=300.0),
    # Does the rest run?
    "ppo": Check(ppo, SHARED, MICRO, beside=True),
    "offload": Check(grpo, (*SHARED, "engine.offload_optimizer=true", "run.num_threads=8"), beside=True),
    "lora": Check(grpo, (*SHARED, "model.lora.rank=16"), beside=True),
    "fp32": Check(grpo, (*SHARED, "model=fp32"), beside=True),
    "ppo_packed_zero0": Check(
        ppo, (*SHARED, "model.packing=true", "engine=zero0"), (*MICRO, "model.packing=true", "engine.zero_stage=0"), beside=True
    ),
    # Memory and seconds.
    "grpo_0.5b": Check(grpo, GRAPHS, models="0.5b", limit_s=200.0),
    "grpo_0.5b_eager": Check(grpo, models="0.5b"),
    "turns_ppo_1.5b": Check(turns_held, ("placement.share=turns", "generation.gpu_memory_utilization=0.88"), models="1.5b"),
    "turns_engine": Check(grpo, (*TURNS, "generation.engines.count=1")),
    "offload_0.5b": Check(grpo, ("engine.offload_optimizer=true", "run.num_threads=8"), models="0.5b"),
    "zero3": Check(ppo, ("engine=zero3",), ("engine.zero_stage=3",)),
    "turns_zero3": Check(grpo, (*TURNS, "engine=zero3")),
    "turns_lora": Check(grpo, (*TURNS, "model.lora.rank=16")),
    "kernels": Check(kernels, vllm=False),
    # Rows to compare with.
    "sft_0.6b_8k": Check(sft(LONG[1]), models="0.6b", vllm=False),
    "sft_0.6b_16k": Check(sft(LONG[2]), models="0.6b", vllm=False),
    "ppo_verl": Check(ppo, GRAPHS + VERL, models="0.5b", limit_s=200.0),
}  # fmt: skip


# --- models, arithmetic, table --------------------------------------------------------------------------------------


def make_models(folder: Path, shape: dict[str, int]) -> None:
    if (folder / "prompts.jsonl").exists():  # written last
        return
    rng = Random(0)
    tokenizer = pseudo_word_tokenizer(rng)
    torch.manual_seed(0)
    smaller = qwen2_config(tokenizer).to_dict()
    del smaller["layer_types"]
    model = Qwen2ForCausalLM(Qwen2Config(**{**smaller, **shape})).to(torch.bfloat16)
    model.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    reward = AutoModelForSequenceClassification.from_pretrained(folder / "policy", num_labels=1, dtype="auto")
    reward.save_pretrained(folder / "reward")
    tokenizer.save_pretrained(folder / "reward")
    texts = list(islice(beginnings((sentence(rng) for _ in count()), tokenizer), PROMPTS))
    for length in LONG:
        parts = texts[: length // PROMPT_TOKENS - 3]
        rows = [{"prompt": text, "response": " ".join(parts)} for text in texts[:64]]
        (folder / f"long_{length}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


def device_gib() -> float:
    return float(torch.cuda.get_device_properties(0).total_memory / 2**30)


def arithmetic(figures: Figures, models: Path, size: Size) -> Figures:
    """The update's share of the card's arithmetic: 6 operations per parameter and token."""
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    flops = next((each for card, each in FLOPS.items() if card in name), None)
    if flops is None or "update s" not in figures:
        return {}
    parameters = sum(file.stat().st_size for file in (models / "policy").glob("*.safetensors")) / 2
    tokens = size.samples * (PROMPT_TOKENS + size.length)
    return {"update's share of the card": 6 * parameters * tokens / figures["update s"] / flops}


def plan_of(plan: "subprocess.Popen[bytes]", log: Path) -> str:
    """The totals that the preflight expected, in GiB: the actor's, then the critic server's; or its sentence."""
    try:
        plan.wait(20)
    except subprocess.TimeoutExpired:
        plan.send_signal(signal.SIGKILL)
        return "no answer"
    text = log.read_text()
    totals = re.findall(r"[\d.]+", next((line for line in text.splitlines() if "total" in line), ""))
    turns = re.search(r"^In turns.*$", text, re.MULTILINE)
    return turns[0] if turns else " + ".join(totals) or text.strip()[-160:]


def report(rows: Sequence[dict[str, Any]]) -> str:
    """The table, and below it what has no column and what failed."""
    card = "a CPU"
    if torch.cuda.is_available():
        card = f"{torch.cuda.get_device_name(0)}, {device_gib():.0f} GiB, driver {driver_release() or 'unknown'}"
    versions = subprocess.run(
        [sys.executable, "-c", "from importlib.metadata import version as v; "
         "print(', '.join(f'{n} {v(n)}' for n in ('torch', 'transformers', 'deepspeed')))"],
        capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    measured = [*gpu_checks.SHOWN, "update's share of the card", "critic server asleep GiB"]
    columns = [name for name in measured if any(name in row["figures"] for row in rows)]
    memory = [name for name in ("card", *PROGRAMS) if any(name in row["GiB"] for row in rows)]
    heads = ["check", "outcome", "s", "steps", *columns, *(f"{name} GiB, driver" for name in memory), "plan GiB"]
    lines = [
        f"{card}, {versions}, {time.strftime('%Y-%m-%d')}",
        "",
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
    ]
    for row in rows:
        figures = row["figures"]
        cells = [row["check"], row["outcome"], f"{row['seconds']:.0f}", str(figures.get("steps", ""))]
        cells += [f"{figures[name]:.3g}" if name in figures else "" for name in columns]
        cells += [f"{row['GiB'][name]:.1f}" if name in row["GiB"] else "" for name in memory]
        lines.append(f"| {' | '.join([*cells, row.get('plan', '')])} |")
    for row in rows:
        if "more" in row["figures"]:
            lines += ["", f"{row['check']}:", "", "```json", json.dumps(row["figures"]["more"], indent=1), "```"]
        if row["error"]:
            lines += ["", f"{row['check']} failed:", "", "```text", row["error"], "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
