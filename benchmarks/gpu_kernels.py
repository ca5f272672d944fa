"""Log-probabilities and gradients in bf16, padded and packed for the variable-length kernel, beside fp32.

    .venv-actor/bin/python benchmarks/gpu_kernels.py MODELS

Prints one JSON object. MODELS is a folder that benchmarks/gpu.py has made.
"""

import argparse
import json
import time
from pathlib import Path
from random import Random

import torch

from nemo_style_rlhf import parts as nsr

SEEN = "model.layers.1.mlp.down_proj.weight"
"""The weights whose first update is compared."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    device = nsr.setup(nsr.RunConfig(seed=1, device=arguments.device))
    print(json.dumps(measure(arguments.models, device)))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(models: Path, device: torch.device) -> dict[str, float]:
    rng = Random(1)
    lengths = [rng.randrange(20, 1500) for _ in range(24 if device.type == "cuda" else 3)]
    tokens = torch.tensor([rng.randrange(3, 8000) for _ in range(sum(lengths))])
    mask = torch.ones(len(tokens))
    mask[torch.tensor(lengths).cumsum(0) - 1] = 0
    found: dict[str, tuple[torch.Tensor, torch.Tensor, float, float]] = {}
    for name, dtype, packing in (
        ("exact", "float32", False),
        ("padded", "bfloat16", False),
        ("packed", "bfloat16", True),
    ):
        model = nsr.ModelConfig(path=str(models / "policy"), dtype=dtype, packing=packing)
        config = nsr.EngineConfig(optim=nsr.OptimizerConfig(lr=1e-2))  # bf16 would round smaller steps away
        engine = nsr.Engine(nsr.PolicyModel(nsr.load_causal_lm(model)), config, device=device)
        for _ in range(2):  # the second is timed
            synchronize(device)
            started = time.monotonic()
            logprobs = nsr.batch_logprobs(engine, tokens, lengths, mask, config, device, nsr.Ranks())
            synchronize(device)
            seconds = time.monotonic() - started
        for batch, _ in nsr.micro_batch_iterator(tokens, lengths, mask, config, device, nsr.Ranks()):
            engine.backward(engine(batch.input_ids, batch.action_mask).logprobs.sum() / len(tokens))
        peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
        weights = dict(engine.hf_weights())[SEEN].float().cpu()
        engine.step()
        moved = (dict(engine.hf_weights())[SEEN].float().cpu() - weights).flatten()
        found[name] = (logprobs.cpu() * mask, moved, seconds, peak)
        del engine
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    row = {}
    for name in ("padded", "packed"):
        gap = (found[name][0] - found["exact"][0]).abs()
        row |= {f"{name} gap mean": float(gap.mean()), f"{name} gap max": float(gap.max()), f"{name} s": found[name][2]}
        row[f"{name} peak GiB"] = found[name][3]
        row[f"{name} update cosine"] = float(torch.cosine_similarity(found[name][1], found["exact"][1], 0))
    assert row["packed gap mean"] < 2 * row["padded gap mean"] + 1e-3, row
    return row


if __name__ == "__main__":
    main()
