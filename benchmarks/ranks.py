"""How well the ranks of each process share a step, and what nothing overlaps.

    .venv-actor/bin/python benchmarks/ranks.py [--ranks 1 2 4 8] [--samples 256 1024]

Critic and actor compute their parts of a step with a small model on that many gloo ranks. A rank is busy while it computes a
micro-batch that counts. `busy` counts micro-batches, `by size` weighs them: all ranks wait for the largest of a round.
Both come from the shapes that the models were called with. The bytes are those of the ranks' TCP connections, as the kernel
counts them (`ss`). Then the seconds that nothing overlaps: those of serial_work.py, and of the last scoring request's way to a
server that computes nothing (protocol.py) and back; a train step's way is beside the actor's update.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import pseudo_word_tokenizer
from protocol import TOKEN, WANTED
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from nemo_style_rlhf.critic_service.protocol import INFER, InferRequest, TrainPlan
from nemo_style_rlhf.critic_service.worker_group import RankMessage
from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.data.ragged import micro_batches, padded_rows, round_up
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.engine.process_group import init_distributed
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, SampleId
from nemo_style_rlhf.launch.bootstrap import setup
from nemo_style_rlhf.launch.interpreter import ROOT
from nemo_style_rlhf.launch.program import ACTOR_PYTHON, SERVER_PYTHON, Program
from nemo_style_rlhf.models.loading import load_causal_lm
from nemo_style_rlhf.models.policy import PolicyModel
from nemo_style_rlhf.ppo.update import mini_batch_plan, update_actor
from nemo_style_rlhf.rollout.logprobs import action_mask, batch_logprobs
from nemo_style_rlhf.rollout.prefetched import pack
from nemo_style_rlhf.rollout.producer import SCORING_GROUP
from nemo_style_rlhf.rollout.types import Batch, Experience, Rollout
from nemo_style_rlhf.schema.algorithm import AlgorithmConfig
from nemo_style_rlhf.schema.common import EngineConfig, ModelConfig, RunConfig
from nemo_style_rlhf.schema.critic import PPOCriticConfig
from nemo_style_rlhf.scoring.futures import resolved
from nemo_style_rlhf.scoring.interface import Scores
from nemo_style_rlhf.wire import messages
from nemo_style_rlhf.wire.connection import Connection

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 8192,
}
PROMPT_TOKENS, LONGEST = 16, 128
MINI_BATCHES = 4
SERIAL_SAMPLES, SERIAL_TOKENS = 1024, 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--samples", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--row-multiple", type=int, default=8, help="engine.row_multiple: 8 on a CPU, 1 on CUDA")
    parser.add_argument("--rounds", type=int, default=5, help="of what nothing overlaps")
    parser.add_argument("--work", choices=["critic", "actor"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        engine = EngineConfig(zero_stage=2, row_multiple=arguments.row_multiple)
        work(arguments.work, arguments.folder, engine, arguments.samples)
        return
    with tempfile.TemporaryDirectory() as scratch:
        make_models(Path(scratch))
        print("| process, part | samples | ranks | busy | by size | MB sent per rank, mean | most |")
        print("|---|---|---|---|---|---|---|")
        for side in ("critic", "actor"):
            for ranks in arguments.ranks:
                for row in shared_work(side, Path(scratch), ranks, arguments):
                    print(row, flush=True)
        print_serial(Path(scratch), arguments.rounds, max(arguments.ranks))


def make_models(folder: Path) -> None:
    import random

    tokenizer = pseudo_word_tokenizer(random.Random(0))
    config = LlamaConfig(**SHAPE, pad_token_id=tokenizer.pad_token_id, num_labels=1)
    for name, kind in (("policy", LlamaForCausalLM), ("reward", LlamaForSequenceClassification)):
        torch.manual_seed(0)
        kind(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def shared_work(side: str, folder: Path, ranks: int, arguments: argparse.Namespace) -> list[str]:
    """Rows of the table, from :func:`work` on that many ranks."""
    words = [
        str(ACTOR_PYTHON),
        __file__,
        "--work",
        side,
        "--folder",
        str(folder),
        "--samples",
        *map(str, arguments.samples),
    ]
    words += ["--row-multiple", str(arguments.row_multiple)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        Program(side, words, ranks=ranks).command, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return [line for line in done.stdout.splitlines() if line.startswith("|")]


# --- on every rank ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark(RankMessage[None]):
    """A part begins or ends."""


class Seen:
    """The forwards of this rank's models, cut into parts."""

    def __init__(self) -> None:
        self.parts: list[list[tuple[int, int]]] = [[]]
        """Rows and padded length of each forward."""

    def watch(self, module: torch.nn.Module) -> None:
        module.register_forward_pre_hook(lambda _, given: self.parts[-1].append(tuple(given[0].shape)))

    def mark(self, _: Mark) -> None:
        self.parts.append([])


class Report:
    """On the first rank: what was measured of each part."""

    def __init__(self, ranks: Ranks, config: EngineConfig, *, time_multiple: int = 1) -> None:
        """``time_multiple``: lengths are padded to it."""
        self._config, self._time_multiple = config, time_multiple
        self._pids = ranks.all_gather(os.getpid())
        self._before: Counter[int] = Counter()
        self.rows: list[tuple[str, int, int, int, list[int]]] = []
        """Part, samples, micro-batches that count, their padded tokens, bytes sent by each rank."""

    def begin(self) -> None:
        self._before = sent_bytes(self._pids)

    def end(self, part: str, lengths: list[int], groups: Sequence[Sequence[int]]) -> None:
        """
        Args:
            groups: sequences that are computed together.
        """
        sent = sent_bytes(self._pids)
        budget, multiple = self._config.micro_batch_tokens, self._config.row_multiple or 1
        needed, tokens = 0, 0
        for rows in groups:
            of_rows = [lengths[row] for row in rows]
            split = micro_batches(of_rows, token_budget=budget, ranks=len(self._pids), row_multiple=multiple)
            needed += len(split)
            for indices in split:
                longest = of_rows[indices[0]]
                tokens += round_up(longest, self._time_multiple) * padded_rows(
                    len(indices), longest, multiple=multiple, token_budget=budget
                )
        self.rows.append((part, len(lengths), needed, tokens, [sent[pid] - self._before[pid] for pid in self._pids]))

    def print(self, side: str, seen: list[list[list[tuple[int, int]]]]) -> None:
        """
        Args:
            seen: ``Seen.parts`` of all ranks; every second part is one of ours.
        """
        ranks = len(self._pids)
        for number, (part, samples, needed, tokens, sent) in enumerate(self.rows):
            forwards = [of_rank[2 * number + 1] for of_rank in seen]
            rounds = max(len(each) for each in forwards)
            padded = sum(
                max(rows * length for each in forwards for rows, length in each[index : index + 1])
                for index in range(rounds)
            )
            busy = f"{needed / (ranks * rounds):.2f}" if rounds else ""
            weighed = f"{tokens / (ranks * padded):.2f}" if rounds else ""
            mean, most = sum(sent) / ranks / 1e6, max(sent) / 1e6
            print(f"| {side}, {part} | {samples} | {ranks} | {busy} | {weighed} | {mean:.2f} | {most:.2f} |")


def sent_bytes(pids: list[int]) -> Counter[int]:
    """Bytes that the processes have sent through their TCP connections."""
    listed = subprocess.run(["ss", "-tinpH"], capture_output=True, text=True, check=True).stdout
    found: Counter[int] = Counter()
    for pid, sent in re.findall(r"pid=(\d+),fd=\d+\)\)\n.*?bytes_sent:(\d+)", listed):
        found[int(pid)] += int(sent)
    return found


def work(side: str, folder: Path, engine: EngineConfig, samples: list[int]) -> None:
    device = setup(RunConfig(output_dir="", device="cpu", num_threads=1))
    init_distributed(device)
    (critic_work if side == "critic" else actor_work)(folder, device, engine, samples)
    os._exit(0)


def drawn_lengths(samples: int) -> list[int]:
    drawn = np.random.default_rng(0).lognormal(3.5, 0.6, samples).clip(4, LONGEST - PROMPT_TOKENS)
    return [PROMPT_TOKENS + int(length) for length in drawn]


def critic_work(folder: Path, device: torch.device, engine: EngineConfig, samples: list[int]) -> None:
    from nemo_style_rlhf.critic_service.worker import CriticWorker

    config = PPOCriticConfig(model=ModelConfig(str(folder / "reward"), dtype="float32"), engine=engine)
    worker = CriticWorker(config, device, should_stop=lambda: False)
    group, seen = worker.group, Seen()
    assert worker.reward is not None
    seen.watch(worker.engine.module)
    group.join({Mark: seen.mark})
    report = Report(group, engine)
    if not group.is_first:
        group.follow()
        group.gather(seen.parts)
        return
    for count in samples:
        lengths = drawn_lengths(count)
        flat = np.random.default_rng(1).integers(3, SHAPE["vocab_size"], sum(lengths)).astype(np.int32)
        whole = InferRequest(flat, np.array(lengths, dtype=np.int32))
        largest = -(-count // -(-count // (SCORING_GROUP * group.size)))
        groups = [range(first, min(first + largest, count)) for first in range(0, count, largest)]
        offsets = whole.offsets
        requests = [
            InferRequest(flat[offsets[rows[0]] : offsets[rows[-1] + 1]], whole.lengths[rows[0] : rows[-1] + 1])
            for rows in groups
        ]
        values: list[Any] = []
        for part in ("values", "train step"):
            group.run(Mark())
            report.begin()
            if part == "values":
                values = [worker.values(request) for request in requests]
                report.end(part, lengths, groups)
            else:
                mask = np.ones(len(flat), dtype=np.float32)
                order = np.random.default_rng(2).permutation(count)
                plan = [rows.tolist() for rows in np.array_split(order, MINI_BATCHES)]
                floats = np.concatenate(values)
                worker.train(whole, floats, floats, mask, TrainPlan(plan, [float(len(flat))] * MINI_BATCHES, ""), 1)
                report.end(part, lengths, plan)
            group.run(Mark())
    group.dismiss()
    report.print("critic", group.gather(seen.parts))


def actor_work(folder: Path, device: torch.device, config: EngineConfig, samples: list[int]) -> None:
    ranks, seen, algorithm = Ranks(), Seen(), AlgorithmConfig(mini_batches=MINI_BATCHES, kl_in="reward")
    policy = load_causal_lm(ModelConfig(str(folder / "policy"), dtype="float32"))
    engine = Engine(PolicyModel(policy, temperature=1.0), config, device=device, total_steps=100)
    seen.watch(engine.module)
    report = Report(ranks, config, time_multiple=8)

    def measured(part: str, compute: Any, lengths: list[int], groups: Any) -> Any:
        ranks.barrier()
        seen.mark(Mark())
        if ranks.is_first:
            report.begin()
        ranks.barrier()
        result = compute()
        ranks.barrier()
        if ranks.is_first:
            report.end(part, lengths, groups)
        seen.mark(Mark())
        return result

    for count in samples:
        lengths = drawn_lengths(count)
        batch = drawn_batch(lengths)
        tokens, mask = torch.cat([each.tokens for each in batch.rollouts]), action_mask(batch.rollouts)
        measured("rollouts to all ranks", partial(ranks.from_first, pack(batch)), lengths, [])
        logprobs = measured(
            "log-probabilities",
            partial(batch_logprobs, engine, tokens, lengths, mask, engine.config, device, ranks),
            lengths,
            [range(count)],
        )
        noise = torch.randn(len(tokens), generator=torch.Generator().manual_seed(0))
        experience = Experience(
            rollouts=batch.rollouts, lengths=lengths, temperatures=None, tokens=tokens, mask=mask, sampler_logprobs=None,
            logprobs=logprobs, ref_logprobs=None, scores=batch.scores.result(), kl=torch.zeros_like(noise), kl_coef=0.0,
            rewards=noise, advantages=noise, returns=noise, correction=None, counts={},
        )  # fmt: skip
        plan = mini_batch_plan(experience, algorithm, seed=0, step=1)
        measured(
            "update",
            partial(update_actor, engine, experience, plan, algorithm, ranks, max_length=LONGEST, seed=0),
            lengths,
            plan,
        )
    gathered = ranks.gather(seen.parts)
    if ranks.is_first:
        report.print("actor", gathered)
    ranks.barrier()


def drawn_batch(lengths: list[int]) -> Batch:
    draw = torch.Generator().manual_seed(0)
    rollouts = []
    for number, length in enumerate(lengths):
        ids = torch.randint(3, SHAPE["vocab_size"], (length,), generator=draw)
        request = GenerationRequest(SampleId(1, number, 0), tuple(ids[:PROMPT_TOKENS].tolist()), 0, LONGEST)
        completion = Completion(request, ids[PROMPT_TOKENS:], -torch.ones(length - PROMPT_TOKENS), "stop", 0)
        rollouts.append(Rollout.from_completion(completion, Prompt(number, ids[:PROMPT_TOKENS].tolist(), "")))
    return Batch(1, rollouts, resolved(Scores(torch.zeros(len(lengths)))), len(lengths), {})


# --- what nothing overlaps --------------------------------------------------------------------------------------------


def print_serial(folder: Path, rounds: int, ranks: int) -> None:
    shape = ["--samples", str(SERIAL_SAMPLES), "--tokens", str(SERIAL_TOKENS), "--rounds", str(rounds)]
    benchmarks = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, benchmarks / "serial_work.py", *shape], capture_output=True, text=True, check=True
    )
    around = float(re.findall(r"\*\*([\d.]+)\*\*", done.stdout)[-1])
    ready = folder / "door.json"
    server = subprocess.Popen(
        [SERVER_PYTHON, benchmarks / "protocol.py", "--serve", "door", "--ready-file", ready],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while not ready.exists():
            if server.poll() is not None:
                raise SystemExit(
                    "the server did not start: benchmarks/protocol.py --serve door --ready-file /tmp/r says why"
                )
            time.sleep(0.2)
        connection = Connection("127.0.0.1", json.loads(ready.read_text())["port"], token=TOKEN, retries=0)
        print(
            f"\n| {SERIAL_SAMPLES} samples of {SERIAL_TOKENS} tokens, critic of | around the models | last request | both, s |"
        )
        print("|---|---|---|---|")
        for answering in (1, ranks):
            size = min(SCORING_GROUP * answering, SERIAL_SAMPLES)
            request = messages.ragged([np.full(SERIAL_TOKENS, row, dtype=np.int32) for row in range(size)]) | WANTED
            seconds = []
            for _ in range(rounds + 1):
                started = time.perf_counter()
                connection.call(INFER, request, timeout_s=60)
                seconds.append(time.perf_counter() - started)
            last = statistics.median(seconds[1:])
            print(f"| {answering} ranks | {around:.3f} | {last:.3f} | **{around + last:.2f}** |", flush=True)
        connection.close()
    finally:
        server.terminate()
        server.wait(60)


if __name__ == "__main__":
    main()
