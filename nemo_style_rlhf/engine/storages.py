"""Moves tensors between a device and host memory by their storages: the tensor objects stay the same, so every view, link and
optimizer group that refers to them stays valid."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage, nn

from nemo_style_rlhf.engine.memory_use import give_back


def address(tensor: Tensor) -> int:
    """Identifies the storage that ``tensor`` shares with its views."""
    return tensor.untyped_storage()._cdata


def weights_of(module: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers of ``module``, and the shards of the parameters that ZeRO-3 shards."""
    for parameter in module.parameters():
        yield parameter
        for shard in ("ds_tensor", "ds_secondary_tensor"):
            if getattr(parameter, shard, None) is not None:
                yield getattr(parameter, shard)
    yield from module.buffers()


class Storages:
    """The memory behind a changing set of tensors. While it is away, the tensors keep their shapes but have no content."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], device: torch.device) -> None:
        """Move what ``tensors`` returns at that time, except tensors on another device or in a memory-mapped file."""
        self._tensors, self._device = tensors, device
        self._away: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}
        """The emptied storage and its content in host memory, by the storage's address."""
        self._spare: list[UntypedStorage] = []
        """Host memory of the last time: pinning takes longer than copying."""

    @property
    def away(self) -> bool:
        return bool(self._away)

    def offload(self) -> None:
        """Copy the content to host memory and free the device's memory. Without effect while it is away."""
        if self._away:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # other streams may still read
        spare = defaultdict(list)
        for buffer in self._spare:
            spare[buffer.nbytes()].append(buffer)
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            if tensor.device.type != self._device.type or not size or not storage.resizable():
                continue
            host = spare[size].pop() if spare[size] else self._host_memory(size)
            self._away[address(tensor)] = storage, host.copy_(storage)
            storage.resize_(0)
        self._spare = []
        give_back(self._device)

    def reload(self) -> None:
        """Copy the content back. Without effect while it is there."""
        away, self._away = self._away, {}
        for storage, host in away.values():
            storage.resize_(host.nbytes())
            storage.copy_(host)
        if self._device.type == "cuda":
            self._spare += [host for _, host in away.values()]

    def content(self, tensor: Tensor) -> Tensor | None:
        """A tensor in host memory with the content of ``tensor``; None unless that is away."""
        found = self._away.get(address(tensor))
        if found is None:
            return None
        there = torch.empty(0, dtype=tensor.dtype)
        return there.set_(found[1], tensor.storage_offset(), tensor.shape, tensor.stride())

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Make tensors that are away readable in the block, as tensors in host memory."""
        emptied = [
            (tensor, tensor.data, there) for tensor in self._tensors() if (there := self.content(tensor)) is not None
        ]
        try:
            for tensor, _, there in emptied:
                tensor.data = there
            yield
        finally:
            for tensor, data, _ in emptied:
                tensor.data = data

    def _host_memory(self, size: int) -> UntypedStorage:
        host = UntypedStorage(size)
        return host.pin_memory() if self._device.type == "cuda" else host
