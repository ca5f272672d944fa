"""Seconds from step to step with one generation engine, by staleness, against the longer of sampling and training.

    .venv-actor/bin/python benchmarks/async_cycle.py --rewards latency

Engine and trainer have a core each. Without staleness they take turns, so that run's phases are the parts alone: sampling lasts
until the last reward is there, training is the rest. With staleness 1 a step should last as long as the longer of the two.
"""

import argparse
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import report
from ppo_step import DTYPES, make_models, models_dir
from processes import ROOT

from nemo_style_rlhf.launch.program import ACTOR_PYTHON, ENGINE_CONFIG, Program, trainer
from nemo_style_rlhf.launch.supervisor import Supervisor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_sizes(parser)
    parser.add_argument("--rewards", choices=["latency", "long_tail"], default="latency", help="see slow_rewards.py")
    parser.add_argument(
        "--staleness", type=int, nargs="+", default=[0, 1], help="0 comes first: it is what others are compared with"
    )
    parser.add_argument("--rounds", type=int, default=2, help="runs of each staleness, in turn")
    parser.add_argument("--steps", type=int, default=8, help="counted steps of a run")
    parser.add_argument("--warmup", type=int, default=3, help="first steps of a run, which do not count")
    arguments = parser.parse_args()
    make_models(arguments)
    rows: dict[int, list[dict[str, float]]] = {staleness: [] for staleness in arguments.staleness}
    for _ in range(arguments.rounds):
        for staleness in arguments.staleness:
            rows[staleness] += run(arguments, staleness)[-arguments.steps :]
    together = rows[arguments.staleness[0]]
    sampling, training = median(together, sampling_of), median(together, training_of)
    print(f"sampling alone {sampling:.2f} s, training alone {training:.2f} s, in turn; {arguments.rewards}\n")
    print("| staleness | seconds per step | of the longer part | waiting for samples | engine idle |")
    print("|---|---|---|---|---|")
    for staleness, measured in rows.items():
        step, waiting = median(measured, lambda row: row["timers/step"]), median(measured, waiting_of)
        idle = median(measured, lambda row: row["timers/beside_idle"])
        print(f"| {staleness} | {step:.2f} | {step / max(sampling, training):.2f} | {waiting:.2f} | {idle:.2f} |")


def sampling_of(row: dict[str, float]) -> float:
    """Until the last reward: the forwards of the trainer's models begin before it."""
    return waiting_of(row) + row["timers/logprobs"] + row["timers/reference_logprobs"]


def training_of(row: dict[str, float]) -> float:
    return row["timers/step"] - waiting_of(row)


def waiting_of(row: dict[str, float]) -> float:
    return row["timers/wait_for_rollout"] + row["timers/wait_for_scores"]


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that :func:`overrides` takes."""
    parser.add_argument("--model", choices=sorted(DTYPES), default="19m", help="see benchmarks/models.py")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--response-length", type=int, default=48)
    parser.add_argument("--ppo-epochs", type=int, default=1, help="more of them make training longer")
    parser.add_argument("--work-dir", type=Path, default=ROOT / "outputs" / "benchmarks")


def median(rows: list[dict[str, float]], of: Any) -> float:
    return report.median([of(row) for row in rows])


def run(arguments: argparse.Namespace, staleness: int) -> list[dict[str, float]]:
    """The metrics of a run."""
    folder = arguments.work_dir / "run_async"
    rewards = [
        "reward.function.path=benchmarks/slow_rewards.py", f"reward.function.name={arguments.rewards}",
        f"reward.function.per_sample={arguments.rewards == 'long_tail'}", "reward.function.processes=8",
        f"model.dtype={DTYPES[arguments.model]}", f"algorithm.max_steps={arguments.warmup + arguments.steps}",
    ]  # fmt: skip
    return run_beside_engine(trainer("train_ppo_actor", folder, *overrides(arguments, staleness), *rewards), folder)


def overrides(arguments: argparse.Namespace, staleness: int) -> list[str]:
    """GRPO in a trainer of one thread that waits for an engine started by somebody else."""
    return [
        "algorithm=grpo", "reward=function", "run.num_threads=1",
        f"model.path={models_dir(arguments) / 'policy'}", f"data.train_path={models_dir(arguments) / 'prompts.jsonl'}",
        f"generation.max_length={arguments.response_length}", "generation.ignore_eos=true", "generation.engines.count=1",
        "generation.engines.launch=false", f"algorithm.num_rollout_samples={arguments.samples}",
        "algorithm.samples_per_prompt=8", "algorithm.mini_batches=2", f"algorithm.ppo_epochs={arguments.ppo_epochs}",
        f"algorithm.staleness={staleness}", "algorithm.correction.kind=tis",
    ]  # fmt: skip


def run_beside_engine(actor: Program, folder: Path) -> list[dict[str, float]]:
    """The metrics of a run of ``actor``, on the first core, and one engine, on the second."""
    shutil.rmtree(folder, ignore_errors=True)
    first, second = cores()
    engines = folder / "engines"
    words = [
        f"--config-dir={engines}",
        f"--config-name={ENGINE_CONFIG}",
        "server.port=0",
        f"server.ready_file={engines}/one.json",
    ]
    engine = Program("engine", [str(ACTOR_PYTHON), "servers/serve_engine.py", *words])
    with Supervisor(folder) as launcher:
        launcher.start(pinned(actor, first))
        while not (engines / f"{ENGINE_CONFIG}.yaml").exists():
            if launcher[actor.name].poll() is not None:
                raise launcher[actor.name].failed()
            time.sleep(0.1)
        launcher.start(pinned(engine, second))
        launcher.wait(actor.name)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def pinned(program: Program, core: int) -> Program:
    """``program`` on one core."""
    return replace(program, argv=["taskset", "-c", str(core), *program.argv])


def cores() -> list[int]:
    """The trainer's core and the engine's."""
    return sorted(os.sched_getaffinity(0))[:2]


if __name__ == "__main__":
    main()
