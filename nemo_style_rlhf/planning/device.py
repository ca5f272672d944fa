"""The device on which a plan must fit."""

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
"""Bytes of a process before it loads a model. cpu: measured, imports of each process (``benchmarks/memory.py``); cuda: estimated,
context and libraries, without NCCL's buffers for several ranks."""


@dataclass(frozen=True)
class Device:
    kind: str
    """cpu or cuda."""
    memory: int
    """Memory in bytes."""
    name: str

    @property
    def cuda(self) -> bool:
        return self.kind == "cuda"

    def libraries(self, process: str) -> int:
        """Bytes that ``actor`` or ``critic`` holds before it loads a model."""
        return LIBRARIES[self.kind][process]


def find_device(config: PlanConfig) -> Device:
    """The device that ``run.device`` and ``device_gib`` describe.

    Raises:
        UserError: ``run.device`` is a CUDA device, this machine has none, and ``device_gib`` does not describe it.
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
