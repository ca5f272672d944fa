"""How evenly ranks share a rollout whose response lengths have a long tail: through the work queue, and dealt beforehand.

    .venv-actor/bin/torchrun --nproc-per-node=2 benchmarks/work_queue.py

Every rank has a vLLM of its own on the 19 M-parameter policy. Lengths are log-normal, at most 256 tokens, and those of a
prompt's samples alike. Prints a Markdown table; `work_queue.jsonl` in the work directory says which rank generated which
samples, in the order in which they were done.
"""

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import models
import numpy as np
import torch
from processes import ROOT

from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.data.ranks import Ranks
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, SampleId, sample_seed
from nemo_style_rlhf.generation.vllm import VLLMGenerator
from nemo_style_rlhf.launch.bootstrap import init_distributed, setup
from nemo_style_rlhf.models.cpu_linear import matmul_dtype
from nemo_style_rlhf.rollout.sampling import generate_and_score
from nemo_style_rlhf.schema.common import RunConfig
from nemo_style_rlhf.schema.generation import GenerationConfig
from nemo_style_rlhf.scoring.interface import Scores, ScoringSample
from nemo_style_rlhf.tracking.metrics import write_jsonl

LONGEST = 256
SAMPLES_PER_PROMPT = 8


class Counting:
    """A generator that notes what it generated."""

    def __init__(self, generator: VLLMGenerator) -> None:
        self._generator = generator
        self.started = self.ended = time.perf_counter()
        self.tokens = 0
        self.samples: list[int] = []

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._generator.submit(requests)

    def completed(self) -> Iterator[Completion]:
        for completion in self._generator.completed():
            self.ended = time.perf_counter()
            self.tokens += len(completion.token_ids)
            self.samples.append(completion.request.sample.prompt_id)
            yield completion


class NoScores:
    def score(self, samples: Sequence[ScoringSample]) -> Future[Scores]:
        scores: Future[Scores] = Future()
        scores.set_result(Scores(torch.zeros(len(samples))))
        return scores


class DealtBeforehand(Ranks):
    def queue(self, count: int, *, dealt: int) -> Iterator[int]:
        yield from range(self.rank, count, self.size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work-dir", type=Path, default=ROOT / "outputs" / "benchmarks")
    arguments = parser.parse_args()
    device = setup(RunConfig(output_dir=str(arguments.work_dir), num_threads=1))
    init_distributed(device)
    ways = {"queue": Ranks(), "dealt beforehand": DealtBeforehand()}
    ranks = ways["queue"]
    folder = arguments.work_dir / "models" / "19m"
    ranks.on_first(lambda: models.make("19m", folder))
    generator = VLLMGenerator(
        str(folder / "policy"), GenerationConfig(max_length=LONGEST, ignore_eos=True, kv_cache_gib=0.5),
        dtype=str(matmul_dtype(torch.empty(0, dtype=torch.bfloat16, device=device))).removeprefix("torch."),
        seed=0, max_model_len=models.PROMPT_TOKENS + LONGEST, eos_token_ids=[], weight_shapes={},
    )  # fmt: skip
    rows, traces = [], []
    for number in range(arguments.rounds):
        for name, way in ways.items():
            requests, prompts = rollout(arguments.samples, number)
            ranks.barrier()
            counting = Counting(generator)
            generate_and_score(counting, NoScores(), requests, prompts, lambda prompt, response: "", way)
            shares = ranks.all_gather((counting.tokens, counting.ended - counting.started, counting.samples))
            rows.append(row(number, name, shares))
            traces.append({"rollout": number, "dealing": name, "samples": [share[2] for share in shares]})
    if ranks.is_first:
        print(
            "| rollout | | tokens of the busiest rank over the mean | seconds, rank by rank | samples, rank by rank |"
        )
        print("|---|---|---|---|---|")
        print("\n".join(rows), flush=True)
        write_jsonl(arguments.work_dir / "work_queue.jsonl", traces)
    ranks.barrier()
    os._exit(0)  # vLLM's engine would take seconds to end


def rollout(samples: int, number: int) -> tuple[list[GenerationRequest], dict[int, Prompt]]:
    rng = np.random.default_rng(number)
    of_prompts = rng.lognormal(3.0, 1.0, -(-samples // SAMPLES_PER_PROMPT)).repeat(SAMPLES_PER_PROMPT)[:samples]
    lengths = np.clip((of_prompts * rng.lognormal(0.0, 0.3, samples)).astype(int), 1, LONGEST)
    prompts = {
        index: Prompt(index, rng.integers(1, 8000, models.PROMPT_TOKENS).tolist(), "") for index in range(samples)
    }
    ids = [SampleId(number, index, 0) for index in range(samples)]
    return [
        GenerationRequest(sample, tuple(prompts[sample.prompt_id].token_ids), sample_seed(0, sample), int(length))
        for sample, length in zip(ids, lengths, strict=True)
    ], prompts


def row(number: int, name: str, shares: list[tuple[int, float, list[str]]]) -> str:
    tokens = [share[0] for share in shares]
    seconds = ", ".join(f"{share[1]:.1f}" for share in shares)
    samples = ", ".join(str(len(share[2])) for share in shares)
    return f"| {number} | {name} | {max(tokens) * len(tokens) / sum(tokens):.2f} | {seconds} | {samples} |"


if __name__ == "__main__":
    main()
