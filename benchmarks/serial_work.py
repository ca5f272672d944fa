"""What training waits for that no accelerator speeds up: rows turned into tensors, advantages, metrics, requests, files.

    .venv-actor/bin/python benchmarks/serial_work.py [--samples 1024] [--tokens 4096] [--rounds 5]

One step's batch goes through everything that surrounds the models in one process. Generator, policy and scores answer at once,
with random tokens and numbers, so what is measured is our own work. Prints a Markdown table of medians in seconds.
"""

import argparse
import random
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from models import pseudo_word_tokenizer
from torch import Tensor

from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, SampleId
from nemo_style_rlhf.launch import malloc
from nemo_style_rlhf.models.decoding import backend, decoder_loader
from nemo_style_rlhf.models.policy import ActionLogprobs
from nemo_style_rlhf.ppo.metrics import repetition_metrics, rollout_metrics
from nemo_style_rlhf.ppo.recording import step_samples
from nemo_style_rlhf.ppo.trainer import critic_batch
from nemo_style_rlhf.ppo.update import mini_batch_plan
from nemo_style_rlhf.rollout.experience import ExperienceBuilder
from nemo_style_rlhf.rollout.logprobs import micro_batch_iterator
from nemo_style_rlhf.rollout.producer import Producer, Timers
from nemo_style_rlhf.schema.algorithm import AlgorithmConfig
from nemo_style_rlhf.schema.common import EngineConfig
from nemo_style_rlhf.schema.tracking import RolloutsConfig
from nemo_style_rlhf.scoring.interface import Scores, ScoringSample
from nemo_style_rlhf.tracking.rollouts import RolloutWriter

PROMPT_TOKENS = 96
VOCABULARY = 8192


class Instant:
    """Replaces the generator, its stream, the reward source and the policy, and answers at once."""

    def __init__(self, responses: dict[SampleId, tuple[Tensor, Tensor]]) -> None:
        self._responses = responses
        self._requests: Sequence[GenerationRequest] = []

    def stream(self, version: int) -> "Instant":
        return self

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._requests = requests

    def completed(self) -> Iterator[Completion]:
        for request in self._requests:
            yield Completion(request, *self._responses[request.sample], "length", 0)

    def score(self, samples: Sequence[ScoringSample]) -> "Future[Scores]":
        scores: Future[Scores] = Future()
        tokens = sum(len(sample.tokens) for sample in samples)
        scores.set_result(Scores(torch.randn(len(samples)), values=torch.randn(tokens)))
        return scores

    def __call__(self, input_ids: Tensor, action_mask: Tensor, **_: Any) -> ActionLogprobs:
        return ActionLogprobs(torch.full((int(action_mask.sum()),), -1.0), None)

    def logprobs(self, tokens: Tensor, lengths: Sequence[int], mask: Tensor, temperatures: Tensor | None) -> Tensor:
        return -1.1 * mask


def one_step(
    producer: Producer, builder: ExperienceBuilder, writer: RolloutWriter, beside: ThreadPoolExecutor, step: int
) -> dict[str, float]:
    """Do one step, and return seconds by part."""
    timers = Timers()
    batch = producer.batch(step, 0, 0, timers)
    repetition = beside.submit(repetition_metrics, batch.rollouts)
    experience = builder.build(batch, timers)
    rollout_metrics(experience)
    timers.lap("metrics")
    plan = mini_batch_plan(experience, builder.algorithm, seed=0, step=step)
    critic_batch(experience, plan)
    timers.lap("critic's batch")
    for rows in plan:
        for _ in micro_batch_iterator(
            experience.tokens, experience.lengths, experience.mask, builder.engine, builder.device, builder.ranks, rows
        ):
            pass
    timers.lap("micro-batches of the update")
    writer.write(step_samples(step, experience, experience.logprobs))
    timers.lap("rollouts handed over")
    repetition.result()
    timers.lap("repetition, as far as it takes longer than all that")
    seconds = dict(timers.seconds)
    began = perf_counter()
    writer.flush()
    return seconds | {"(beside training: decoding and writing rollouts)": perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=4096, help="of each sample, prompt and response")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    malloc.keep_freed_memory()  # as all our processes do
    prompts = [
        Prompt(number, torch.randint(VOCABULARY, (PROMPT_TOKENS,)).tolist(), "") for number in range(arguments.samples)
    ]
    length = arguments.tokens - PROMPT_TOKENS
    algorithm = AlgorithmConfig(num_rollout_samples=arguments.samples, mini_batches=4)
    folder = tempfile.TemporaryDirectory()
    tokenizer = pseudo_word_tokenizer(random.Random(0))
    load = decoder_loader(tokenizer, "", trust_remote_code=False)
    writer = RolloutWriter(Path(folder.name) / "rollouts", RolloutsConfig(), load, backend(tokenizer))
    writer.rewind(0)
    beside = ThreadPoolExecutor(1)
    rounds = []
    for step in range(1, arguments.rounds + 2):
        responses = {
            SampleId(step, prompt.prompt_id, 0): (torch.randint(VOCABULARY, (length,)), -torch.ones(length))
            for prompt in prompts
        }
        instant: Any = Instant(responses)
        producer = Producer(
            instant, instant, lambda position, count: prompts[:count], lambda prompt, response: "", algorithm, length,
            run_seed=0, ranks=Ranks(),
        )  # fmt: skip
        builder = ExperienceBuilder(instant, instant, algorithm, EngineConfig(), torch.device("cpu"), 1.0, Ranks())
        rounds.append(one_step(producer, builder, writer, beside, step))
    writer.close()
    print(f"| part, {arguments.samples} samples of {arguments.tokens} tokens | seconds |\n|---|---|")
    medians = {part: median(seconds[part] for seconds in rounds[1:]) for part in rounds[0]}
    for part, seconds in medians.items():
        print(f"| {part} | {seconds:.3f} |")
    print(f"| **all that training waits for** | **{sum(list(medians.values())[:-1]):.3f}** |")


if __name__ == "__main__":
    main()
