"""The configuration and the devices of a run's engines."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from nemo_style_rlhf.checkpoint.files import write_atomically
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch.composition import config_file
from nemo_style_rlhf.launch.program import ENGINE_CONFIG
from nemo_style_rlhf.schema.common import ModelConfig, RunConfig
from nemo_style_rlhf.schema.generation import GenerationConfig, TrainingGenerationConfig
from nemo_style_rlhf.schema.placement import PlacementConfig


def describe(
    folder: Path, model: ModelConfig, config: TrainingGenerationConfig, run: RunConfig, placement: PlacementConfig, *,
    max_length: int, stop_strings: bool,
) -> None:  # fmt: skip
    """Write ``<folder>/this_run.yaml``, the configuration of every engine of a run."""
    content = {
        "run": {
            "seed": run.seed,
            "device": run.device,
            "num_threads": config.engines.threads or run.num_threads,
            "deterministic": run.deterministic,
        },
        "model": _part(ModelConfig, model),
        "generation": _part(GenerationConfig, config),
        "sequences": {"max_length": max_length, "stop_strings": stop_strings},
        "placement": asdict(placement),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{ENGINE_CONFIG}.yaml", config_file("engine", content).encode())


def _part(schema: type[Any], given: Any) -> dict[str, Any]:
    """The fields of ``schema`` in an instance of a class that extends it."""
    return {name: value for name, value in asdict(given).items() if name in {each.name for each in fields(schema)}}


def devices_beside(ranks: int, visible: Sequence[str], engines: int, size: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each engine: ``size`` GPUs of this host, after the first ``ranks``.

    Raises:
        UserError: they are too few.
    """
    if len(visible) < (needed := ranks + engines * size):
        raise UserError(
            f"generation.engines.count={engines} with {size} GPUs each beside {ranks} ranks needs {needed} GPUs, this host shows "
            f"{len(visible)}: start fewer, or start them elsewhere and give generation.engines.launch=false"
        )
    return [",".join(visible[first : first + size]) for first in range(ranks, needed, size)]
