"""Keeps weights that never change on the device only while they are used."""

import torch
from torch import nn


class HostCopy:
    """Keeps the parameters and buffers of a frozen module in host memory, pinned for a CUDA device."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        """``module`` is in host memory, and stays there until :meth:`load`."""
        self._device = device
        self._tensors = [*module.parameters(), *module.buffers()]
        if device.type == "cuda":
            for tensor in self._tensors:
                tensor.data = tensor.data.pin_memory()
        self._in_host_memory = [tensor.data for tensor in self._tensors]

    def load(self) -> None:
        """Copy parameters and buffers that are not on the device yet."""
        for tensor in self._tensors:
            tensor.data = tensor.data.to(self._device)

    def rest(self) -> None:
        """Free the device's memory; nothing is copied back."""
        for tensor, in_host_memory in zip(self._tensors, self._in_host_memory, strict=True):
            tensor.data = in_host_memory
