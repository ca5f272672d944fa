"""Makes the generator that asks engines, and the store of weights from which they load."""

import logging
import os
from pathlib import Path

import torch

from nemo_style_rlhf.engines.client import CALLS
from nemo_style_rlhf.engines.fleet import Fleet
from nemo_style_rlhf.engines.pool import GROUP, EnginePool
from nemo_style_rlhf.engines.programs import describe, devices_beside
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.generation.weight_store import WeightStore
from nemo_style_rlhf.launch import interrupt
from nemo_style_rlhf.schema.common import ModelConfig, RunConfig
from nemo_style_rlhf.schema.generation import TrainingGenerationConfig
from nemo_style_rlhf.schema.placement import PlacementConfig

log = logging.getLogger(__name__)
CALLS_AHEAD = 2
"""Ratio of the requests sent to an engine to the requests that it decodes at a time, so that it never waits for the next."""


def make_engine_pool(
    model: ModelConfig, config: TrainingGenerationConfig, run: RunConfig, *, device: torch.device, max_model_len: int,
    weight_shapes: dict[str, tuple[int, ...]], stop_strings: bool, one_by_one: bool = False,
    placement: PlacementConfig | None = None,
) -> EnginePool:  # fmt: skip
    """A generator that asks engines. The engines start at once.

    Args:
        one_by_one: True if requests come one at a time, as from episodes.
        placement: says whether the engines share the trainer's devices.
    """
    placement = placement or PlacementConfig()
    folder = Path(run.output_dir).resolve() / "engines"
    if config.engines.weights == "nccl" and not (device.type == "cuda" and torch.distributed.is_nccl_available()):
        raise UserError("generation.engines.weights=nccl needs GPUs: give gloo, or auto")
    if config.engines.weights != "auto" and config.engines.tls.ca is not None:
        log.warning("generation.engines.weights=%s sends weights without TLS", config.engines.weights)
    devices = _devices(config, placement) if device.type == "cuda" else ()
    fleet = Fleet(config.engines, folder, devices=devices, bits=bool(run.deterministic))
    describe(folder, model, config, run, placement, max_length=max_model_len, stop_strings=stop_strings)
    fleet.start()
    calls = CALLS_AHEAD * config.max_num_seqs // (1 if one_by_one else GROUP)
    return EnginePool(fleet, weight_shapes=weight_shapes, calls=config.engines.count * min(max(1, calls), CALLS))


def _devices(config: TrainingGenerationConfig, placement: PlacementConfig) -> list[str]:
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = given.split(",") if given else [str(number) for number in range(torch.cuda.device_count())]
    ranks = 0 if placement.in_turns else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return (
        devices_beside(ranks, visible, config.engines.count, config.tensor_parallel_size)
        if config.engines.launch
        else []
    )


def make_weight_store(run_id: str, output_dir: str, *, shared: bool = False) -> WeightStore:
    """The published weights of a run, in memory where the system offers that as a folder; an interrupt removes them.

    Args:
        shared: True if other hosts must see the folder.
    """
    root = interrupt.weights_in_memory(run_id)
    if shared or not root.parent.is_dir():
        root = Path(output_dir).resolve() / "engines" / root.name
    interrupt.remove_at_end(root)
    return WeightStore(root)
