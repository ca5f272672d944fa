"""Episodes with a tool per second: GRPO on the calculator of examples/agents, beside TRL's environments.

    .venv-actor/bin/python benchmarks/agent_step.py --peer

The policy is the one that the example has trained (it is run first if its results are not there), which calls the calculator in
nearly every episode. A step is a rollout of 128 episodes and two optimizer steps. Runs alternate with TRL's GRPOTrainer and its
`environment_factory` (`make bench-peer-env` first) on the same policy, problems and sizes. The rate is that of all counted steps
together: how long a step lasts depends on its longest episode.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import report
from processes import PEER_GRPO_PYTHON, ROOT, run_actor, run_json
from rounds import Measured, alternate, phases_of

CALLS: dict[str, list[float]] = {}
"""Mean number of tool calls in the episodes of each step, by side: both must have done the same work."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", action="store_true", help="alternate with TRL's GRPOTrainer and print the ratio")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    parser.add_argument("--steps", type=int, default=5, help="counted steps of a run")
    parser.add_argument("--warmup", type=int, default=2, help="first steps of a run, which do not count")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--mini-batches", type=int, default=2)
    parser.add_argument("--max-length", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2, help="torch threads of every process")
    parser.add_argument("--work-dir", type=Path, default=ROOT / "outputs" / "benchmarks")
    parser.add_argument("--actor", action="append", default=[], metavar="KEY=VALUE", help="another override")
    arguments = parser.parse_args()
    if arguments.peer and not PEER_GRPO_PYTHON.exists():
        parser.error("--peer needs TRL's environment: run `make bench-peer-env` first")
    make_policy(arguments)
    ours, peer = alternate(arguments, measure_ours, measure_peer)
    print(report.table(*report.phase_rows(ours, None)))
    print()
    sides = {"nemo_style_rlhf": ours, **({"TRL": peer} if peer else {})}
    seconds = [statistics.mean(side.step_seconds) for side in sides.values()]
    rows = [
        ["episodes/s", *(f"{arguments.samples / each:.1f}" for each in seconds)],
        ["medians of the rounds, seconds per step"]
        + [" ".join(f"{each:.2f}" for each in side.round_medians) for side in sides.values()],
        ["tool calls in an episode", *(f"{statistics.mean(CALLS[name]):.2f}" for name in sides)],
        ["peak RSS, GiB", *(f"{max(side.peak_rss_bytes.values()) / 2**30:.2f}" for side in sides.values())],
    ]
    if peer:
        rows.append(["**episodes/s over TRL's**", f"**{seconds[1] / seconds[0]:.2f}**", "1"])
    print(report.table(["", *sides], rows))


def make_policy(arguments: argparse.Namespace) -> None:
    """Run the example, unless it has been."""
    if not (folder(arguments) / "summary.json").exists():
        script = ROOT / "examples" / "agents" / "calculator" / "run.py"
        subprocess.run([sys.executable, script, "--output-dir", folder(arguments)], check=True, stdout=sys.stderr)


def folder(arguments: argparse.Namespace) -> Path:
    return Path(arguments.work_dir / "calculator")


def measure_ours(arguments: argparse.Namespace, result: Measured) -> None:
    run_dir = arguments.work_dir / "run_agents"
    shutil.rmtree(run_dir, ignore_errors=True)
    overrides = [
        "algorithm=grpo",
        "data=messages",
        "data.label_key=answer",
        "reward=environment",
        "agent.path=examples/agents/calculator/environment.py",
        "agent.tool_parser=hermes",
        "agent.max_turns=4",
        f"run.num_threads={arguments.threads}",
        "model.dtype=float32",
        f"model.path={folder(arguments) / 'actor' / 'export'}",
        f"data.train_path={folder(arguments) / 'data' / 'problems.jsonl'}",
        f"generation.max_length={arguments.max_length}",
        f"algorithm.num_rollout_samples={arguments.samples}",
        f"algorithm.samples_per_prompt={arguments.group}",
        f"algorithm.mini_batches={arguments.mini_batches}",
        "algorithm.initial_policy_kl_penalty=0",
        "engine.zero_stage=0",
        "engine.optim.lr=1e-6",
        f"algorithm.max_steps={arguments.warmup + arguments.steps}",
        *arguments.actor,
    ]
    child, lines = run_actor(run_dir / "actor", overrides)
    counted = lines[-arguments.steps :]
    CALLS.setdefault("nemo_style_rlhf", []).extend(line["environment/tool_calls"] for line in counted)
    result.add_round(*phases_of(counted), {"actor": child.peak_rss_bytes})


def measure_peer(arguments: argparse.Namespace, result: Measured) -> None:
    command = [
        PEER_GRPO_PYTHON, "benchmarks/peer_trl_agents.py", "--model", folder(arguments) / "actor" / "export", "--rows",
        folder(arguments) / "data" / "problems.jsonl", "--samples", arguments.samples, "--group", arguments.group,
        "--max-length", arguments.max_length, "--mini-batches", arguments.mini_batches, "--threads", arguments.threads,
        "--steps", arguments.steps, "--warmup", arguments.warmup,
    ]  # fmt: skip
    peer = run_json(command, arguments.work_dir / "peer_agents.log")
    CALLS.setdefault("TRL", []).extend(peer["calls"][-arguments.steps :])
    result.add_round(peer["seconds"], {}, {"TRL": peer["peak_rss_bytes"]})


if __name__ == "__main__":
    main()
