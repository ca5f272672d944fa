"""Synthesizes the rollouts of a long run, for benchmarks/watch.py."""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer, models, pre_tokenizers

sys.path.append(str(Path(__file__).parents[1]))

from tests.support.rollout_files import TOKEN_LISTS, schema_with, write_compacted, write_step

WORDS = 4000
PROMPT_TOKENS = 64
SCORES = ("helpful", "length")
STEPS_PER_FILE = 50


@dataclass(frozen=True)
class Size:
    steps: int = 1000
    samples: int = 512
    tokens: int = 512
    """Tokens of each response."""
    samples_per_prompt: int = 8

    @property
    def prompts(self) -> int:
        """Number of distinct prompts: each returns after a hundred steps."""
        return 100 * self.samples // self.samples_per_prompt


def write_run(folder: Path, size: Size) -> None:
    """A run's folder with all its steps but the newest compacted, the newest half of a file as single ones."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, size.steps + 1)))
    (folder / "config.yaml").write_text("run:\n  seed: 1\n")
    words = np.array(
        ["<eos>", *(f"{one}{two}{three}" for one in SYLLABLES for two in SYLLABLES for three in SYLLABLES)]
    )
    words = words[: WORDS + 1]
    vocabulary = Tokenizer(
        models.WordLevel({str(word): number for number, word in enumerate(words)}, unk_token="<eos>")
    )
    vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    vocabulary.save(str(folder / "rollouts" / "tokenizer.json"))
    single = min(size.steps, STEPS_PER_FILE // 2)
    for first in range(1, size.steps - single + 1, STEPS_PER_FILE):
        last = min(first + STEPS_PER_FILE - 1, size.steps - single)
        write_compacted(folder / "rollouts", first, last, [table(step, size, words) for step in range(first, last + 1)])
    for step in range(size.steps - single + 1, size.steps + 1):
        write_step(folder / "rollouts", step, table(step, size, words))


SYLLABLES = ("ba", "de", "fi", "go", "hu", "ka", "le", "mi", "no", "pu", "ra", "se", "ti", "vo", "wu", "za")


def table(step: int, size: Size, words: np.ndarray) -> pa.Table:
    """One step: random numbers, which no compression makes smaller, as those of a model are."""
    random = np.random.default_rng(step)
    count, length = size.samples, size.tokens
    groups = count // size.samples_per_prompt
    prompt_ids = np.repeat((np.arange(groups) + step * groups) % size.prompts, size.samples_per_prompt)
    prompts = {
        int(each): np.random.default_rng(int(each)).integers(1, WORDS, PROMPT_TOKENS) for each in set(prompt_ids)
    }
    responses = random.integers(1, WORDS, (count, length))
    tokens = np.concatenate([np.stack([prompts[int(each)] for each in prompt_ids]), responses], 1).astype(np.int32)
    numbers = {name: random.normal(0, 1, (count, length)).astype(np.float32) for name in TOKEN_LISTS}
    numbers["kl"] = np.square(numbers["kl"]) * 0.02
    reward = random.normal(step / size.steps, 1, count).astype(np.float32)
    failed = random.random(count) < 0.002
    turn = [[{"start": PROMPT_TOKENS, "end": PROMPT_TOKENS + length, "finish_reason": "stop"}]] * count
    columns = {
        "step": np.full(count, step, np.int32),
        "row": np.arange(count, dtype=np.int32),
        "prompt_id": prompt_ids.astype(np.int64),
        "index": (np.arange(count) % size.samples_per_prompt).astype(np.int32),
        "prompt": [" ".join(words[prompts[int(each)]]) for each in prompt_ids],
        "response": [" ".join(row) for row in words[responses]],
        "label": None,
        "finish_reason": np.where(random.random(count) < 0.1, "length", "stop"),
        "failed": failed,
        "reward": pa.array(reward, mask=failed),
        **{f"score/{name}": random.normal(0, 1, count).astype(np.float32) for name in SCORES},
        "response_tokens": np.full(count, length, np.int32),
        "prompt_tokens": np.full(count, PROMPT_TOKENS, np.int32),
        "turns": turn,
        "weights_version": np.full(count, step, np.int32),
        "kl_sum": numbers["kl"].sum(1),
        "kl_mean": numbers["kl"].mean(1),
        "kl_max": numbers["kl"].max(1),
        "advantage_mean": numbers["advantages"].mean(1),
        "value_mean": numbers["values"].mean(1),
        "ratio_max": np.abs(numbers["ratios"]).max(1),
        "sampler_gap_max": np.abs(numbers["logprobs"] - numbers["sampler_logprobs"]).max(1),
        "learned_tokens": np.full(count, length, np.int32),
        "tokens": lists(tokens),
        "mask": lists(np.ones((count, length), bool)),
        "weights_versions": lists(np.full((count, length), step, np.int32)),
        **{name: lists(values) for name, values in numbers.items()},
    }
    schema = schema_with(SCORES)
    arrays = [
        pa.nulls(count, field.type) if columns[field.name] is None else pa.array(columns[field.name], field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def lists(values: np.ndarray) -> pa.ListArray:
    """Rows of a matrix as lists, without a Python object per number."""
    offsets = np.arange(0, values.size + 1, values.shape[1], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.reshape(-1)))
