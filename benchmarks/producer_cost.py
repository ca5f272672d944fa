"""Does the producer, the trainer's thread that asks engines for the next rollout, slow down the update beside it?

    .venv-actor/bin/python benchmarks/producer_cost.py

One run with staleness 1; trainer and engine have a core each. Every update is the same work. The steps take turns in what goes on
beside it:

- nothing: before the step's work, the trainer waits until the next rollout and its rewards have arrived;
- an engine that samples for another process: the trainer waits likewise, then a process on the engine's core asks the engine for
  as many samples;
- the producer: the engine samples the next rollout, which arrives during the update.

The producer's cost is the third against the second, because an engine that computes slows its neighbor down through memory and
caches, whoever asked it. Comparing the first rank with another would not show the cost: each waits for the slowest at every
all-reduce, so their updates take equally long. The ratio is an upper bound: the producer and the reward function's process have
no core but the update's.
"""

import argparse
import multiprocessing
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from unittest import mock

from async_cycle import add_sizes, cores, median, overrides, run_beside_engine
from ppo_step import make_models
from report import table

from nemo_style_rlhf.engines.client import EngineClient
from nemo_style_rlhf.engines.pool import GROUP, EnginePool
from nemo_style_rlhf.generation.interface import GenerationRequest
from nemo_style_rlhf.launch.malloc import THREAD_CACHES_OFF, TUNABLES
from nemo_style_rlhf.launch.program import trainer
from nemo_style_rlhf.programs import train_ppo_actor
from nemo_style_rlhf.rollout.producer import Timers
from nemo_style_rlhf.rollout.queue import BatchQueue
from nemo_style_rlhf.rollout.types import Batch
from nemo_style_rlhf.wire.connection import LeaseLost
from nemo_style_rlhf.wire.secret import own_token_made

NOTHING, OTHER, PRODUCER = COMPANIONS = ("nothing", "an engine that samples for another process", "the producer")
"""Step k trains beside the companion number k modulo 3."""
HIGHEST = 1.05
"""Seconds of an update beside the producer, as a multiple of those beside the other process: at most this."""
AT_ONCE_S = 0.05
"""A shorter wait for a rollout means that it was there."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_sizes(parser)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument("--rounds", type=int, default=12, help="counted steps beside each companion, in turn")
    parser.add_argument("--warmup", type=int, default=3, help="first steps, which do not count")
    parser.add_argument("--train", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        core, *words = arguments.train
        return train(int(core), words)
    make_models(arguments)
    rows = measure(arguments)
    beside = {name: [row for row in rows[:-1] if companion(row["step"]) == name] for name in COMPANIONS}
    update = {name: median(own, lambda row: row["timers/actor_update"]) for name, own in beside.items()}
    logprobs = {name: median(own, lambda row: row["timers/logprobs"]) for name, own in beside.items()}
    lines = [
        [name, f"{logprobs[name]:.3f}", f"{update[name]:.3f}", f"{update[name] / update[OTHER]:.3f}"]
        for name in COMPANIONS
    ]
    print(
        f"{arguments.samples} samples x {arguments.response_length} tokens, medians of {arguments.rounds} steps each\n"
    )
    print(
        table(["beside the update", "log-probabilities before it, s", "update, s", "against the other process"], lines)
    )
    print(
        f"\nThe producer's cost: {update[PRODUCER] / update[OTHER]:.3f}, wanted: at most {HIGHEST}. Its rollout arrived after "
        f"the log-probabilities and before the step's end in {arrived_beside(rows)} of {arguments.rounds} steps"
    )


def measure(arguments: argparse.Namespace) -> list[dict[str, float]]:
    """The metrics of the counted steps and of the run's last one, beside which nothing is sampled."""
    folder = arguments.work_dir / "run_producer"
    own = [
        "reward.function.path=benchmarks/distinct_words.py", "reward.function.processes=1", f"model.dtype={arguments.dtype}",
        "algorithm.initial_policy_kl_penalty=0",
        f"algorithm.max_steps={arguments.warmup + len(COMPANIONS) * arguments.rounds + 1}",
    ]  # fmt: skip
    actor = trainer("train_ppo_actor", folder, *overrides(arguments, 1), *own, env={TUNABLES: THREAD_CACHES_OFF})
    python, _, *words = actor.argv
    actor = replace(actor, argv=[python, "benchmarks/producer_cost.py", "--train", str(cores()[1]), *words])
    return run_beside_engine(actor, folder)[arguments.warmup :]


def companion(step: float) -> str:
    return COMPANIONS[int(step) % len(COMPANIONS)]


def arrived_beside(rows: list[dict[str, float]]) -> int:
    """Number of steps in which the producer's rollout arrived between the log-probabilities and the next step."""
    return sum(
        companion(row["step"]) == PRODUCER
        and row["timers/beside_sampling"] > row["timers/logprobs"]
        and following["timers/wait_for_rollout"] < AT_ONCE_S
        for row, following in pairwise(rows)
    )


def train(core: int, words: list[str]) -> None:
    """The trainer, whose steps take turns. ``core`` is the engine's."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=sample_for_nobody, args=(theirs, core), daemon=True).start()
    next_batch = BatchQueue.batch

    def in_turn(queue: BatchQueue, step: int, timers: Timers) -> Batch:
        batch = next_batch(queue, step, timers)
        following = queue._batches.get(step + 1)
        if companion(step) != PRODUCER and following is not None:
            following.result().scores.result()
            if companion(step) == OTHER:
                pool = queue._generator
                assert isinstance(pool, EnginePool)
                (engine,) = pool._fleet._engines.values()
                ours.send((engine.where, pool._fleet.lease, pool._version, requests_of(batch)))
        timers.lap("held")
        return batch

    sys.argv[1:] = words
    with mock.patch.object(BatchQueue, "batch", in_turn):
        train_ppo_actor()


def requests_of(batch: Batch) -> list[GenerationRequest]:
    """The requests that made the samples of ``batch``."""
    return [
        GenerationRequest(rollout.sample, tuple(rollout.prompt.token_ids), rollout.seed, rollout.max_length)
        for rollout in batch.rollouts
    ]


def sample_for_nobody(calls: Connection, core: int) -> None:
    """Have the trainer's engine sample what arrives at ``calls``, in groups as the producer does, until the trainer ends."""
    os.sched_setaffinity(0, {core})
    with suppress(EOFError), ThreadPoolExecutor() as pool:
        while True:
            where, lease, version, requests = calls.recv()
            client = EngineClient(where["host"], where["port"], token=own_token_made(), retries=0, timeout_s=600)
            groups = [requests[start : start + GROUP] for start in range(0, len(requests), GROUP)]
            with suppress(LeaseLost):  # the trainer has gone on, with new weights
                list(pool.map(partial(client.generate, lease=lease, version=version), groups))
            client.close()


if __name__ == "__main__":
    main()
