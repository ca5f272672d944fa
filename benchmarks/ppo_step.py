"""Seconds of a PPO step, phase by phase: the real critic server and the real actor on the same cores.

    .venv-actor/bin/python benchmarks/ppo_step.py --peer

Prints a Markdown report: seconds and share of each phase beside bare compute and its matrix products (benchmarks/bare.py),
samples/s, tokens/s, peak memory of both processes; with ``--peer`` also TRL's PPOTrainer on the same model, prompts and sizes
(`make bench-peer-env` first), whose runs alternate with ours, and the ratio of the medians. Warm-up steps count on neither side.
"""

import argparse
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import report
from processes import PEER_PYTHON, ROOT, critic_server, run, run_actor, run_json
from rounds import Measured, alternate, phases_of

from nemo_style_rlhf.launch.program import ACTOR_PYTHON, Program

DTYPES = {"19m": "bfloat16", "stories": "float32"}


def main() -> None:
    arguments = parse_arguments()
    make_models(arguments)
    ours, peer = alternate(arguments, measure_ours, measure_peer)
    bare = None if arguments.no_bare else measure_bare(arguments)
    results = {"ours": asdict(ours), "peer": asdict(peer) if peer else None, "bare": bare}
    (arguments.work_dir / "results.json").write_text(json.dumps(results, indent=1))
    print(report.markdown(arguments, ours, peer, bare))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(DTYPES), default="19m", help="see benchmarks/models.py")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="of all models on both sides")
    parser.add_argument("--peer", action="store_true", help="alternate with TRL's PPOTrainer and print the ratio")
    parser.add_argument("--compile", action="store_true", help="torch.compile on our side")
    parser.add_argument("--peer-compile", action="store_true", help="torch.compile on the peer's side")
    parser.add_argument(
        "--old-logprobs",
        choices=["sampler", "trainer"],
        default="sampler",
        help="sampler is what TRL's PPOTrainer does; trainer, our default, is one forward pass more",
    )
    parser.add_argument("--no-bare", action="store_true", help="leave bare compute out")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    parser.add_argument("--steps", type=int, default=5, help="counted steps of a run")
    parser.add_argument("--warmup", type=int, default=2, help="first steps of a run, which do not count")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--response-length", type=int, default=64)
    parser.add_argument("--mini-batches", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2, help="torch threads of every process")
    parser.add_argument("--work-dir", type=Path, default=ROOT / "outputs" / "benchmarks")
    parser.add_argument(
        "--actor", action="append", default=[], metavar="KEY=VALUE", help="another override for the actor"
    )
    parser.add_argument("--critic", action="append", default=[], metavar="KEY=VALUE", help="... for the critic server")
    arguments = parser.parse_args()
    arguments.dtype = arguments.dtype or DTYPES[arguments.model]
    if arguments.peer and not PEER_PYTHON.exists():
        parser.error("--peer needs TRL's environment: run `make bench-peer-env` first")
    return arguments


def make_models(arguments: argparse.Namespace) -> None:
    command = [ACTOR_PYTHON, "benchmarks/models.py", "--model", arguments.model, "--output-dir", models_dir(arguments)]
    run(Program("models", [str(word) for word in command]), arguments.work_dir / "models.log")


def models_dir(arguments: argparse.Namespace) -> Path:
    return Path(arguments.work_dir) / "models" / arguments.model


def measure_ours(arguments: argparse.Namespace, result: Measured) -> None:
    run_dir = arguments.work_dir / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    common = [
        f"run.num_threads={arguments.threads}",
        f"model.dtype={arguments.dtype}",
        f"model.compile={str(arguments.compile).lower()}",
    ]
    critic = [*common, f"model.path={models_dir(arguments) / 'reward'}", *arguments.critic]
    actor = [
        *common,
        f"model.path={models_dir(arguments) / 'policy'}",
        f"data.train_path={models_dir(arguments) / 'prompts.jsonl'}",
        f"generation.max_length={arguments.response_length}",
        "generation.ignore_eos=true",
        f"algorithm.num_rollout_samples={arguments.samples}",
        f"algorithm.mini_batches={arguments.mini_batches}",
        f"algorithm.old_logprobs={arguments.old_logprobs}",
        f"algorithm.max_steps={arguments.warmup + arguments.steps}",
        *arguments.actor,
    ]
    with critic_server(run_dir / "critic", critic) as (server, port):
        child, lines = run_actor(run_dir / "actor", actor, (server, port))
    peaks = {"actor": child.peak_rss_bytes, "critic server": server.peak_rss_bytes}
    seconds, phases = phases_of(lines[-arguments.steps :])
    if arguments.old_logprobs == "sampler":
        del phases["logprobs"]  # they came with the samples
    result.add_round(seconds, phases, peaks)


def measure_peer(arguments: argparse.Namespace, result: Measured) -> None:
    command = [
        PEER_PYTHON, "benchmarks/peer_trl_ppo.py", "--models", models_dir(arguments), "--dtype", arguments.dtype,
        *shape(arguments), "--steps", arguments.steps, "--warmup", arguments.warmup,
        *(["--compile"] if arguments.peer_compile else []),
    ]  # fmt: skip
    peer = run_json(command, arguments.work_dir / "peer.log")
    result.add_round(peer["seconds"], peer["phases"], {"TRL": peer["peak_rss_bytes"]})


def measure_bare(arguments: argparse.Namespace) -> dict[str, Any]:
    command = [
        ACTOR_PYTHON, "benchmarks/bare.py", "--models", models_dir(arguments), "--dtype", arguments.dtype,
        *shape(arguments), *(["--compile"] if arguments.compile else []),
    ]  # fmt: skip
    return run_json(command, arguments.work_dir / "bare.log")


def shape(arguments: argparse.Namespace) -> list[object]:
    return [
        "--samples", arguments.samples, "--response-length", arguments.response_length,
        "--mini-batches", arguments.mini_batches, "--threads", arguments.threads,
    ]  # fmt: skip


if __name__ == "__main__":
    main()
