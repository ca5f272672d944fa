"""What a plan is measured against."""

from dataclasses import dataclass

import psutil
import torch

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.planning.phases import GIB
from nemo_style_rlhf.schema.plan import PlanConfig

MIB = 2**20
LIBRARIES = {
    "cpu": {"actor": 640 * MIB, "critic": 440 * MIB},
    "cuda": {"actor": 500 * MIB, "critic": 500 * MIB},
}
"""Bytes before there is a model. cpu: the imports of each process, measured (``benchmarks/memory.py``); cuda: estimated, the
context and its libraries; NCCL's buffers of several ranks come on top."""


@dataclass(frozen=True)
class Device:
    kind: str
    """cpu or cuda."""
    memory: int
    """Bytes."""
    name: str

    @property
    def cuda(self) -> bool:
        return self.kind == "cuda"

    def libraries(self, process: str) -> int:
        """Bytes that ``actor`` or ``critic`` holds before it has a model."""
        return LIBRARIES[self.kind][process]


def find_device(config: PlanConfig) -> Device:
    """The device of ``run.device`` and ``device_gib``.

    Raises:
        UserError: a CUDA device is asked for that is not here, and ``device_gib`` does not describe it.
    """
    cuda = config.run.device == "cuda" or (config.run.device == "auto" and torch.cuda.is_available())
    if config.device_gib is not None:
        kind = "cuda" if cuda else "cpu"
        return Device(
            kind, int(config.device_gib * GIB), f"a {'CUDA device' if cuda else 'host'} of {config.device_gib:g} GiB"
        )
    if not cuda:
        memory = psutil.virtual_memory().total
        return Device("cpu", memory, f"this host, {memory / GIB:.1f} GiB")
    if not torch.cuda.is_available():
        raise UserError(
            "run.device=cuda but torch sees no CUDA device: give device_gib, the memory of the one to plan for, or run.device=cpu"
        )
    properties = torch.cuda.get_device_properties(0)
    return Device("cuda", properties.total_memory, f"{properties.name}, {properties.total_memory / GIB:.1f} GiB")
