"""vLLM alone, through the class with which a run samples: sample, replace the weights, sample again, sleep and wake.

    .venv-actor/bin/python benchmarks/gpu_sampler.py MODELS [--dtype bfloat16] [--graphs] [--length 128]

Prints one JSON object. MODELS is a folder that benchmarks/gpu.py has made.
"""

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_style_rlhf import parts as nsr

SAMPLES, GROUP = 64, 8
MAX_GAP = {"float32": 1e-3, "bfloat16": 1.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path)
    parser.add_argument("--dtype", choices=sorted(MAX_GAP), default="bfloat16")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs and torch.compile")
    parser.add_argument("--length", type=int, default=128, help="tokens of a response")
    parser.add_argument("--device", default="auto")
    print(json.dumps(measure(parser.parse_args())), flush=True)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        found[f"{name} s"] = round(time.monotonic() - started, 2)
        print(f"{name}: {found[f'{name} s']} s", flush=True)

    with timed("imports and trainer"):
        path = str(given.models / "policy")
        device, tokenizer = nsr.setup(nsr.RunConfig(seed=1, device=given.device)), nsr.load_tokenizer(path)
        model = nsr.ModelConfig(path=path, dtype=given.dtype)
        policy = nsr.Engine(nsr.PolicyModel(nsr.load_causal_lm(model)), nsr.EngineConfig(), device=device)
    rows = (given.models / "prompts.jsonl").read_text().splitlines()[: SAMPLES // GROUP]
    texts = [json.loads(row)["prompt"] for row in rows]
    prompts = [nsr.Prompt(number, tokenizer(text)["input_ids"], text) for number, text in enumerate(texts)]
    longest = max(len(prompt.token_ids) for prompt in prompts) + given.length
    probe = nsr.Probe(prompts, len(tokenizer), max_length=longest, max_gap=MAX_GAP[given.dtype])
    config = nsr.GenerationConfig(
        max_length=given.length, ignore_eos=True, enforce_eager=not given.graphs, kv_cache_gib=1.0, gpu_memory_utilization=0.1
    )  # fmt: skip
    with timed("vLLM starts"):
        generator = nsr.make_generator(
            model, config, tokenizer=tokenizer, device=device, seed=1, max_model_len=longest,
            weight_shapes=nsr.shapes_of(policy.hf_weights()), sleeps=True,
        )  # fmt: skip

    def sample(version: int, name: str) -> list[tuple[list[int], list[float]]]:
        requests = nsr.make_requests(prompts, step=0, samples_per_prompt=GROUP, max_tokens=given.length, run_seed=1)
        with timed(name):
            stream = generator.stream(version)
            stream.submit(requests)
            done = sorted(stream.completed(), key=lambda each: each.request.sample)
        assert len(done) == SAMPLES and all(len(each.token_ids) == len(each.logprobs) == given.length for each in done)
        assert all(each.logprobs.max() <= 0 for each in done), "a log-probability is positive"
        found[f"{name} tokens/s"] = round(SAMPLES * given.length / max(found[f"{name} s"], 0.01))
        return [(each.token_ids.tolist(), each.logprobs.tolist()) for each in done]

    def transfer(version: int, name: str) -> None:
        target = probe.target(policy)
        with timed(name):
            found[f"{name}, probe gap"] = generator.load(nsr.OwnWeights(version, policy.hf_weights(), target))

    first = sample(0, "first sampling")  # compiles kernels
    transfer(1, "weights replaced")
    second = sample(1, "second sampling")
    found["same tokens, same weights"] = sum(a[0] == b[0] for a, b in zip(first, second, strict=True)) / SAMPLES
    with timed("sleep"):
        generator.sleep()
    transfer(2, "wake with weights")
    found["same bits after sleep"] = sample(2, "third sampling") == second
    generator.close()
    return found


if __name__ == "__main__":
    main()
