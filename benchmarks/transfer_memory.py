"""How much memory a weight transfer takes beside what is there before and after it, where ZeRO-3 holds the weights in shares.

    .venv-actor/bin/torchrun --nproc-per-node=2 benchmarks/transfer_memory.py

Every rank has a vLLM of its own. Prints one JSON line of MiB: the policy, the largest bucket, the peak of gathering alone (each
bucket is checked and forgotten) and of the transfer into vLLM, which makes a layer whole beside a bucket and packs it for its
kernels; of the rank that took most. On a GPU as CUDA's allocator saw it, on a CPU all tensors that torch made.
"""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import models
import torch
from nemo_style_rlhf.data.ranks import Ranks
from processes import ROOT
from torch import Tensor

from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.generation import transfer
from nemo_style_rlhf.generation.interface import WeightTransport
from nemo_style_rlhf.generation.vllm import VLLMGenerator
from nemo_style_rlhf.launch.bootstrap import init_distributed, require_all_ranks, setup
from nemo_style_rlhf.models.cpu_linear import matmul_dtype
from nemo_style_rlhf.models.loading import load_causal_lm
from nemo_style_rlhf.models.policy import PolicyModel
from nemo_style_rlhf.planning.tracing import LiveBytes
from nemo_style_rlhf.schema.common import EngineConfig, ModelConfig, RunConfig
from nemo_style_rlhf.schema.generation import GenerationConfig

MIB = 2**20


class Checking:
    """A receiver that keeps nothing."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self._manifest = transfer.TransferManifest(shapes)
        self.begin, self.finish = self._manifest.begin, self._manifest.finish
        self.largest = 0
        """Bytes of the largest bucket."""

    def send(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        self.largest = max(self.largest, sum(tensor.nbytes for _, tensor in bucket))
        self._manifest.receive(bucket)


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
    shapes = {name: tuple(tensor.shape) for name, tensor in transfer.policy_weights(engine)}
    generator = VLLMGenerator(
        str(folder / "policy"), GenerationConfig(kv_cache_gib=0.25), seed=0, max_model_len=128, eos_token_ids=[],
        dtype=str(matmul_dtype(next(engine.module.parameters()))).removeprefix("torch."), weight_shapes=shapes,
    )  # fmt: skip
    require_all_ranks()
    checking = Checking(shapes)
    with mock.patch.object(transfer, "BUCKET_BYTES", arguments.bucket_mib * MIB):
        peaks = [peak(partial(send, engine, receiver), device) for receiver in (checking, generator.transport)]
    policy_bytes = sum(tensor.nbytes for _, tensor in transfer.policy_weights(engine))
    found = dict(zip(("policy", "largest bucket", "gathering", "into vLLM"), (policy_bytes, checking.largest, *peaks)))
    of_all = ranks.all_gather(found)
    if ranks.is_first:
        print(json.dumps({name: round(max(each[name] for each in of_all) / MIB, 2) for name in found}), flush=True)
    ranks.barrier()
    os._exit(0)  # vLLM's engine would take seconds to end


def send(engine: Engine, receiver: WeightTransport) -> None:
    transfer.send_weights(receiver, transfer.policy_weights(engine), 1)


def peak(compute: Callable[[], object], device: torch.device) -> int:
    """Bytes above those before, when ``compute`` does what it has done before."""
    if device.type == "cuda":
        compute()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        compute()
        return torch.cuda.max_memory_allocated() - before
    with LiveBytes(lambda tensor: "all") as live:
        compute()  # what it replaces is known from here on, so that its end counts, too
        before = live.live.total()
        live.peak = live.live.copy()
        compute()
    return live.peak.total() - before


if __name__ == "__main__":
    main()
