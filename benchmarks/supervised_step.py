"""Seconds of an optimizer step of SFT or DPO, as users start them.

    .venv-actor/bin/python benchmarks/supervised_step.py --stage sft --peer

With ``--peer`` also TRL's SFTTrainer or DPOTrainer on the same model, rows and sizes (`make bench-peer-env` first), whose runs
alternate with ours, and the ratio of the medians. Warm-up steps count on neither side.
"""

import argparse
import json
import random
import shutil
from pathlib import Path

import report
from models import sentence
from ppo_step import DTYPES, make_models, models_dir
from processes import PEER_GRPO_PYTHON, ROOT, run, run_json
from rounds import Measured, alternate

from nemo_style_rlhf.launch.program import trainer

ROWS = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", choices=["sft", "dpo"], default="sft")
    parser.add_argument("--model", choices=sorted(DTYPES), default="19m", help="see benchmarks/models.py")
    parser.add_argument("--peer", action="store_true", help="alternate with TRL and print the ratio")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side")
    parser.add_argument("--steps", type=int, default=8, help="counted steps of a run")
    parser.add_argument("--warmup", type=int, default=2, help="first steps of a run, which do not count")
    parser.add_argument("--rows", type=int, default=64, help="rows or pairs of an optimizer step")
    parser.add_argument("--micro-batch-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work-dir", type=Path, default=ROOT / "outputs" / "benchmarks")
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="another one for our side")
    arguments = parser.parse_args()
    if arguments.peer and not PEER_GRPO_PYTHON.exists():
        parser.error("--peer needs TRL's environment: run `make bench-peer-env` first")
    make_models(arguments)
    write_rows(arguments)
    ours, peer = alternate(arguments, measure_ours, measure_peer)
    header = ["", "nemo_style_rlhf", *(["TRL"] if peer else [])]
    sides = [ours, *([peer] if peer else [])]
    seconds = [report.median(side.step_seconds) for side in sides]
    rows = [
        ["seconds per step (median)", *(f"{each:.2f}" for each in seconds)],
        ["medians of the rounds", *(" ".join(f"{each:.2f}" for each in side.round_medians) for side in sides)],
    ]
    if peer:
        rows.append(["**tokens/s over TRL's**", f"**{seconds[1] / seconds[0]:.2f}**", "1"])
    print(
        f"### {arguments.stage}, {arguments.model}, {arguments.rows} rows in micro-batches of {arguments.micro_batch_size}\n"
    )
    print(report.table(header, rows))


def rows_path(arguments: argparse.Namespace) -> Path:
    return Path(arguments.work_dir) / f"{arguments.stage}_rows.jsonl"


def write_rows(arguments: argparse.Namespace) -> None:
    """Write made-up sentences, whose lengths vary like those of real rows."""
    generator = random.Random(0)

    def text() -> str:
        return " ".join(sentence(generator).split()[: generator.randint(4, 20)])

    if arguments.stage == "sft":
        rows = [{"prompt": text(), "completion": f" {text()}"} for _ in range(ROWS)]
    else:
        rows = [{"prompt": text(), "chosen": f" {text()}", "rejected": f" {text()}"} for _ in range(ROWS)]
    rows_path(arguments).write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure_ours(arguments: argparse.Namespace, result: Measured) -> None:
    run_dir = arguments.work_dir / f"run_{arguments.stage}"
    shutil.rmtree(run_dir, ignore_errors=True)
    stage = trainer(
        f"train_{arguments.stage}", run_dir, f"run.num_threads={arguments.threads}",
        f"model.path={models_dir(arguments) / 'policy'}", f"model.dtype={DTYPES[arguments.model]}",
        f"data.train_path={rows_path(arguments)}",
        f"trainer.batch_size={arguments.rows}", f"trainer.micro_batch_size={arguments.micro_batch_size}",
        f"trainer.max_steps={arguments.warmup + arguments.steps}", "trainer.log_interval=1", "tracking.progress=false",
        *(["data.response_key=completion"] if arguments.stage == "sft" else []), *arguments.override,
    )  # fmt: skip
    child = run(stage, run_dir.with_suffix(".log"))
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["timers/step"] for line in lines if "timers/step" in line]
    result.add_round(seconds[arguments.warmup :], {}, {"trainer": child.peak_rss_bytes})


def measure_peer(arguments: argparse.Namespace, result: Measured) -> None:
    command = [
        PEER_GRPO_PYTHON, "benchmarks/peer_trl_supervised.py", "--stage", arguments.stage, "--rows", rows_path(arguments),
        "--model", models_dir(arguments) / "policy", "--batch-size", arguments.rows, "--micro-batch-size",
        arguments.micro_batch_size, "--steps", arguments.steps, "--warmup", arguments.warmup, "--threads", arguments.threads,
    ]  # fmt: skip
    peer = run_json(command, arguments.work_dir / f"peer_{arguments.stage}.log")
    result.add_round(peer["seconds"], {}, {"TRL": peer["peak_rss_bytes"]})


if __name__ == "__main__":
    main()
