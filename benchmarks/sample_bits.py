"""Does a sample keep its bits whatever else its engine computes? Prints a Markdown table, one row for each model and dtype.

    .venv-actor/bin/python benchmarks/sample_bits.py [--samples 48] [--tokens 96] [--models 19m wide]

The same seeded requests, with prompts of 3 to 400 tokens, half of them shared by several samples, are sampled in one batch and in
other ways: alone, in other batches, in another order, by another engine, with prompts cut into chunks, preempted for want of
cache, and continued from a part of their own response whose cache was filled by decoding. An entry is the number of samples whose
tokens differ, then whose log-probabilities differ in any bit. ``wide`` has 768 dimensions and a vocabulary of 100,000.
"""

import argparse
import dataclasses
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from models import make
from transformers import Qwen2Config, Qwen2ForCausalLM

WIDE = {"vocab_size": 100_000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 12,
        "num_key_value_heads": 4, "max_position_embeddings": 1024, "tie_word_embeddings": True}  # fmt: skip
LONGEST_PROMPT = 400
TURN_TOKENS = 16
Samples = dict[str, tuple[list[int], list[float]]]


def make_wide(folder: Path) -> None:
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**WIDE)).save_pretrained(folder / "policy")


def requests_of(samples: int, tokens: int, vocabulary: int) -> list[Any]:
    from nemo_style_rlhf.generation.interface import GenerationRequest, SampleId

    rng = random.Random(1)
    shared = [
        tuple(rng.randrange(3, vocabulary) for _ in range(rng.randrange(40, LONGEST_PROMPT)))
        for _ in range(samples // 16)
    ]
    requests = []
    for index in range(samples):
        own = tuple(rng.randrange(3, vocabulary) for _ in range(rng.randrange(3, LONGEST_PROMPT)))
        prompt = own if index % 2 else shared[index % len(shared)]
        length = rng.randrange(tokens // 2, tokens)
        requests.append(GenerationRequest(SampleId(1, index, 0), prompt, 1000 + index, length))
    return requests


def sample_ways(folder: Path, dtype: str, samples: int, tokens: int, changes: dict[str, Any]) -> dict[str, Samples]:
    """Samples by the way they were sampled, of one engine. It runs in a process of its own, since vLLM takes one engine each."""
    from nemo_style_rlhf.generation.vllm import VLLMGenerator
    from nemo_style_rlhf.launch.bootstrap import setup
    from nemo_style_rlhf.schema.common import RunConfig
    from nemo_style_rlhf.schema.generation import GenerationConfig

    setup(RunConfig(output_dir="unused", device="cpu"))
    requests = requests_of(samples, tokens, json.loads((folder / "config.json").read_text())["vocab_size"])
    generator = VLLMGenerator(
        str(folder), GenerationConfig(max_length=tokens, ignore_eos=True, **changes), dtype=dtype, seed=0,
        max_model_len=LONGEST_PROMPT + tokens + TURN_TOKENS, eos_token_ids=[], weight_shapes={},
    )  # fmt: skip

    def collect(*groups: list[Any], steps: int | None = None) -> Samples:
        """Submit the groups one after the other, or each ``steps`` engine steps after the one before."""
        stream, found = generator.stream(0), {}
        for number, group in enumerate(groups):
            stream.submit(group)
            if steps is None or number == len(groups) - 1:
                for completion in stream.completed():
                    found[str(completion.request.sample)] = completion.token_ids.tolist(), completion.logprobs.tolist()
            else:
                for _ in range(steps):
                    generator.step()
        return found

    first = collect(requests)
    if changes:
        return {"": first}

    def second_turn(request: Any) -> Any:
        grown = (*request.prompt, *first[str(request.sample)][0])
        return dataclasses.replace(
            request, sample=dataclasses.replace(request.sample, index=1), prompt=grown, seed=request.seed + 7,
            max_tokens=TURN_TOKENS,
        )  # fmt: skip

    turns = [second_turn(request) for request in requests]
    third, other = samples // 3, random.Random(2).sample(requests, samples)
    running = dataclasses.replace(turns[0], sample=dataclasses.replace(turns[0].sample, index=2), max_tokens=tokens)
    warm = collect([*requests, running], turns, steps=tokens - 1)  # the cache is kept as long as a request runs
    return {
        "": first,
        "again": collect(requests),
        "alone": {name: one for request in requests for name, one in collect([request]).items()},
        "two batches": collect(requests[:third], requests[third:]),
        "joined by others": collect(requests[:third], requests[third:], steps=7),
        "another order": collect(other),
        "second turn": {name: one for name, one in warm.items() if "index=1" in name},
        "second turn, cold": {name: one for turn in turns for name, one in collect([turn]).items()},
    }


def small_cache(folder: Path, dtype: str, tokens: int) -> float:
    """GiB of cache for three of the longest sequences."""
    config = json.loads((folder / "config.json").read_text())
    head = config["hidden_size"] // config["num_attention_heads"]
    per_token = (
        2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head * (4 if dtype == "float32" else 2)
    )
    return float(3 * per_token * (LONGEST_PROMPT + tokens + TURN_TOKENS + 64) / 2**30)


def measure(folder: Path, dtype: str, samples: int, tokens: int) -> dict[str, tuple[int, int]]:
    def run(**changes: Any) -> dict[str, Samples]:
        command = [sys.executable, __file__, "--child", json.dumps([str(folder), dtype, samples, tokens, changes])]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        found: dict[str, Samples] = json.loads(output.splitlines()[-1])
        return found

    ways = run()
    ways["another engine"] = run(max_num_batched_tokens=4096)[""]
    ways["few at a time"] = run(max_num_seqs=5)[""]
    ways["prompts in chunks of 32"] = run(max_num_seqs=32, max_num_batched_tokens=32)[""]
    ways["preempted"] = run(kv_cache_gib=small_cache(folder, dtype, tokens))[""]
    first, cold = ways.pop(""), ways.pop("second turn, cold")
    return {way: differences(found, cold if way == "second turn" else first) for way, found in ways.items()}


def differences(found: Samples, expected: Samples) -> tuple[int, int]:
    assert found.keys() == expected.keys()
    return sum(found[name][0] != expected[name][0] for name in expected), sum(
        found[name] != expected[name] for name in expected
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--models", nargs="+", choices=["19m", "wide", "stories"], default=["19m", "wide"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        path, *rest = arguments.child
        print("\n" + json.dumps(sample_ways(Path(path), *rest)))
        return
    rows = {}
    with tempfile.TemporaryDirectory() as scratch:
        for model in arguments.models:
            folder = Path(scratch) / model
            make_wide(folder) if model == "wide" else make(model, folder)
            for dtype in arguments.dtypes:
                found = measure(folder / "policy", dtype, arguments.samples, arguments.tokens)
                rows[f"{model}, {dtype}"] = found
                print(model, dtype, found, file=sys.stderr)
    ways = list(next(iter(rows.values())))
    print(f"| of {arguments.samples} samples | {' | '.join(ways)} |")
    print("|---" * (len(ways) + 1) + "|")
    for name, found in rows.items():
        print(f"| {name} | {' | '.join(f'{tokens}, {logprobs}' for tokens, logprobs in found.values())} |")


if __name__ == "__main__":
    main()
