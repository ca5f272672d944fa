"""How much memory a weight transfer takes beside what is there before and after it, where ZeRO-3 holds the weights in shards.

    .venv-actor/bin/torchrun --nproc-per-node=2 benchmarks/transfer_memory.py

Every rank has a vLLM of its own. Prints one JSON line of MiB: the policy, the largest bucket, the peak of gathering alone (each
bucket is checked and forgotten) and of the transfer into vLLM, which makes a layer whole beside a bucket and packs it for its
kernels; of the rank that took most. On a GPU as CUDA's allocator saw it, on a CPU all tensors that torch made.
"""

import argparse
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import models
import torch
from processes import ROOT

from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.engine.process_group import init_distributed, require_all_ranks
from nemo_style_rlhf.generation import transfer
from nemo_style_rlhf.generation.interface import ProbeTarget
from nemo_style_rlhf.generation.vllm import VLLMGenerator
from nemo_style_rlhf.launch.bootstrap import setup
from nemo_style_rlhf.models.cpu_linear import matmul_dtype
from nemo_style_rlhf.models.loading import load_causal_lm
from nemo_style_rlhf.models.policy import PolicyModel
from nemo_style_rlhf.planning.tracing import LiveBytes
from nemo_style_rlhf.schema.common import EngineConfig, ModelConfig, RunConfig
from nemo_style_rlhf.schema.generation import GenerationConfig

MIB = 2**20


def gathered(engine: Engine, shapes: dict[str, tuple[int, ...]]) -> int:
    """Receive the weights, keep none of them, and return the bytes of the largest bucket."""
    buckets = transfer.received(update(engine), shapes)
    return max(sum(tensor.nbytes for _, tensor in bucket) for bucket in buckets)


def update(engine: Engine) -> transfer.OwnWeights:
    logprobs = torch.zeros(1)  # vLLM's log-probabilities are not compared
    return transfer.OwnWeights(1, engine.hf_weights(), ProbeTarget(((0, 1),), (logprobs,), max_gap=float("inf")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bucket-mib", type=int, default=8, help="a run's are larger, but so are its models")
    parser.add_argument("--work-dir", type=Path, default=ROOT / "outputs" / "benchmarks")
    arguments = parser.parse_args()
    device = setup(RunConfig(output_dir=str(arguments.work_dir), num_threads=1))
    init_distributed(device)
    ranks = Ranks()
    folder = arguments.work_dir / "models" / "19m"
    ranks.on_first(lambda: models.make("19m", folder))
    policy = load_causal_lm(ModelConfig(str(folder / "policy")))
    engine = Engine(PolicyModel(policy, temperature=1.0), EngineConfig(zero_stage=3), device=device)
    shapes = {name: tuple(tensor.shape) for name, tensor in engine.hf_weights()}
    generator = VLLMGenerator(
        str(folder / "policy"), GenerationConfig(kv_cache_gib=0.25), seed=0, max_model_len=128, eos_token_ids=[],
        dtype=str(matmul_dtype(next(engine.module.parameters()))).removeprefix("torch."), weight_shapes=shapes,
    )  # fmt: skip
    require_all_ranks()
    with mock.patch.object(transfer, "BUCKET_BYTES", arguments.bucket_mib * MIB):
        largest = gathered(engine, shapes)
        ways = partial(gathered, engine, shapes), lambda: generator.load(update(engine))
        peaks = [peak(way, device) for way in ways]
    policy_bytes = sum(tensor.nbytes for _, tensor in engine.hf_weights())
    found = dict(zip(("policy", "largest bucket", "gathering", "into vLLM"), (policy_bytes, largest, *peaks)))
    of_all = ranks.all_gather(found)
    if ranks.is_first:
        print(json.dumps({name: round(max(each[name] for each in of_all) / MIB, 2) for name in found}), flush=True)
    ranks.barrier()
    os._exit(0)  # vLLM's engine would take seconds to end


def peak(compute: Callable[[], object], device: torch.device) -> int:
    """Peak bytes of a second run of ``compute``, above those before it."""
    if device.type == "cuda":
        compute()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        compute()
        return torch.cuda.max_memory_allocated() - before
    with LiveBytes(lambda tensor: "all") as live:
        compute()  # the tensors that a second run replaces are now known, so that their end counts, too
        before = live.live.total()
        live.peak = live.live.copy()
        compute()
    return live.peak.total() - before


if __name__ == "__main__":
    main()
