"""Seconds of a GRPO step, phase by phase, rewarded by a Python function; no critic, no reference (KL coefficient 0).

    .venv-actor/bin/python benchmarks/grpo_step.py --peer

Prints a Markdown report; with ``--peer`` also TRL's GRPOTrainer on the same policy, prompts and sizes (`make bench-peer-env`
first), whose runs alternate with ours, and the ratio of the medians. Warm-up steps count on neither side.
"""

import argparse
import shutil
from pathlib import Path

import report
from ppo_step import DTYPES, make_models, models_dir
from processes import PEER_GRPO_PYTHON, ROOT, run_actor, run_json
from rounds import Measured, alternate, phases_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(DTYPES), default="19m", help="see benchmarks/models.py")
    parser.add_argument("--peer", action="store_true", help="alternate with TRL's GRPOTrainer and print the ratio")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile, both sides"
    )
    parser.add_argument(
        "--old-logprobs",
        choices=["sampler", "trainer"],
        default="sampler",
        help="trainer, our default and what TRL does, is one forward pass more",
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    parser.add_argument("--steps", type=int, default=5, help="counted steps of a run")
    parser.add_argument("--warmup", type=int, default=2, help="first steps of a run, which do not count")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--response-length", type=int, default=64)
    parser.add_argument("--mini-batches", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2, help="torch threads of every process")
    parser.add_argument("--work-dir", type=Path, default=ROOT / "outputs" / "benchmarks")
    parser.add_argument("--actor", action="append", default=[], metavar="KEY=VALUE", help="another override")
    arguments = parser.parse_args()
    if arguments.peer and not PEER_GRPO_PYTHON.exists():
        parser.error("--peer needs TRL's environment: run `make bench-peer-env` first")
    arguments.dtype = DTYPES[arguments.model]
    make_models(arguments)
    ours, peer = alternate(arguments, measure_ours, measure_peer)
    print(report.markdown(arguments, ours, peer, None))


def measure_ours(arguments: argparse.Namespace, result: Measured) -> None:
    run_dir = arguments.work_dir / "run_grpo"
    shutil.rmtree(run_dir, ignore_errors=True)
    overrides = [
        "algorithm=grpo",
        "reward=function",
        "reward.function.path=benchmarks/distinct_words.py",
        f"run.num_threads={arguments.threads}",
        f"model.dtype={arguments.dtype}",
        f"model.compile={str(arguments.compile).lower()}",
        f"model.path={models_dir(arguments) / 'policy'}",
        f"data.train_path={models_dir(arguments) / 'prompts.jsonl'}",
        f"generation.max_length={arguments.response_length}",
        "generation.ignore_eos=true",
        f"algorithm.num_rollout_samples={arguments.samples}",
        f"algorithm.samples_per_prompt={arguments.group}",
        f"algorithm.mini_batches={arguments.mini_batches}",
        "algorithm.initial_policy_kl_penalty=0",
        f"algorithm.old_logprobs={arguments.old_logprobs}",
        f"algorithm.max_steps={arguments.warmup + arguments.steps}",
        *arguments.actor,
    ]
    child, lines = run_actor(run_dir / "actor", overrides)
    result.add_round(*phases_of(lines[-arguments.steps :]), {"actor": child.peak_rss_bytes})


def measure_peer(arguments: argparse.Namespace, result: Measured) -> None:
    command = [
        PEER_GRPO_PYTHON, "benchmarks/peer_trl_grpo.py", "--models", models_dir(arguments), "--dtype",
        arguments.dtype, "--samples", arguments.samples, "--group", arguments.group, "--response-length",
        arguments.response_length, "--mini-batches", arguments.mini_batches, "--threads", arguments.threads,
        "--steps", arguments.steps, "--warmup", arguments.warmup, *(["--compile"] if arguments.compile else []),
    ]  # fmt: skip
    peer = run_json(command, arguments.work_dir / "peer_grpo.log")
    result.add_round(peer["seconds"], peer["phases"], {"TRL": peer["peak_rss_bytes"]})


if __name__ == "__main__":
    main()
