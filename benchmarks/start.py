"""Starts programs of two checkouts in turn, with tiny models: seconds to the first step and after the last, and processor time.

    .venv-actor/bin/python benchmarks/start.py BEFORE AFTER --programs train_ppo_local train_sft --rounds 5

``BEFORE`` and ``AFTER`` are folders with a checkout and its environments. Processor time is that of the program and of all
processes below it, as the kernel adds it up when they are waited for.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import astuple, dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from tests.support.ppo_runs import save_inputs

LOOK_S = 0.01
STEPS = 3


@dataclass(frozen=True)
class Measured:
    first_s: float
    """Seconds from the command to the first trained step; of a program that trains nothing, to its end."""
    cpu_s: float
    end_s: float
    """Seconds from the last trained step to the prompt; 0 for a program that trains nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--programs", nargs="+", default=["train_ppo_local", "train_sft", "evaluate", "inspect_data"])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print("| program | | before | after | ratio |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        inputs = save_inputs(Path(folder) / "inputs")
        write_supervised_rows(inputs)
        for program in arguments.programs:
            sides: list[list[Measured]] = [[], []]
            for number in range(arguments.rounds):
                order = (0, 1) if number % 2 == 0 else (1, 0)
                for side in order:
                    checkout = (arguments.before, arguments.after)[side].resolve()
                    sides[side].append(
                        measure(checkout, program, inputs, Path(folder) / f"run-{program}-{number}-{side}")
                    )
            for name, before, after in zip(
                ("s to the first step, or the end", "CPU s", "s from the last step to the prompt"),
                *map(columns, sides),
                strict=True,
            ):
                if statistics.median(before):
                    ratio = statistics.median(after) / statistics.median(before)
                    print(
                        f"| {program} | {name} | {described(before)} | {described(after)} | {ratio:.2f} |", flush=True
                    )


def columns(measured: list[Measured]) -> list[tuple[float, ...]]:
    return list(zip(*map(astuple, measured), strict=True))


def described(values: tuple[float, ...]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def write_supervised_rows(folder: Path) -> None:
    pairs = [{"prompt": f"w{i % 60}", "chosen": f" w{i % 50 + 1}", "rejected": f" w{i % 40 + 2} w1"} for i in range(32)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    texts = [{"prompt": pair["prompt"], "response": pair["chosen"]} for pair in pairs]
    (folder / "sft.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))


def words(program: str, inputs: Path, output: Path) -> list[str]:
    policy = [f"run.output_dir={output}", f"model.path={inputs}/policy"]
    stage = [
        *policy,
        "model.dtype=float32",
        f"trainer.max_steps={STEPS}",
        "trainer.batch_size=8",
        "trainer.log_interval=1",
    ]
    return {
        "train_ppo_local": [
            *policy, f"critic.model.path={inputs}/reward", f"data.train_path={inputs}/train.jsonl", "model=fp32",
            "critic.model.dtype=float32", f"algorithm.max_steps={STEPS}", "algorithm.num_rollout_samples=16",
            "generation.max_length=8", "generation.kv_cache_gib=0.1",
        ],
        "train_sft": [*stage, f"data.train_path={inputs}/sft.jsonl"],
        "train_dpo": [*stage, f"data.train_path={inputs}/pairs.jsonl"],
        "train_kto": [*stage, f"data.train_path={inputs}/pairs.jsonl"],
        "train_reward_model": [*stage, f"data.train_path={inputs}/pairs.jsonl"],
        "evaluate": [
            f"run.output_dir={output}", f"checkpoints=[a:{inputs}/policy,b:{inputs}/policy]", f"data.path={inputs}/val.jsonl",
            "model.dtype=float32", "generation.max_length=8", "generation.kv_cache_gib=0.1",
        ],
        "inspect_data": ["stage=sft", f"model.path={inputs}/policy", f"data.train_path={inputs}/sft.jsonl"],
    }[program]  # fmt: skip


def last_step(metrics: Path) -> int:
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    steps = [int(json.loads(line)["step"]) for line in lines if line.endswith("\n")]
    return (
        max(steps, default=0) if metrics.parent.name == "actor" else max(steps, default=-1) + 1
    )  # Lightning's are from 0


def measure(checkout: Path, program: str, inputs: Path, output: Path) -> Measured:
    command = [checkout / ".venv-actor" / "bin" / "python", f"trainers/{program}.py", *words(program, inputs, output)]
    log = output.with_suffix(".log")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    started = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=checkout, stdout=file, stderr=file, env=environment)
    first = last = None
    metrics = output / "actor" / "metrics.jsonl" if program == "train_ppo_local" else output / "metrics.jsonl"
    while (ended := os.wait4(process.pid, os.WNOHANG))[0] == 0:
        steps = last_step(metrics)
        first = first or (time.monotonic() if steps else None)
        last = last or (time.monotonic() if steps >= STEPS else None)
        time.sleep(LOOK_S)
    end = time.monotonic()
    if os.waitstatus_to_exitcode(ended[1]):
        raise SystemExit(f"{program} failed:\n{log.read_text()}")
    used = ended[2]
    return Measured((first or end) - started, used.ru_utime + used.ru_stime, end - (last or end))


if __name__ == "__main__":
    main()
