"""Finds the peak memory of torch code by running it on tensors that have shapes but no memory."""

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of every storage created within this mode, from its creation to its end.

    ``peak`` is the split by kind at the moment of the highest sum. Earlier storages are not counted.
    """

    def __init__(self, kind_of: Callable[[Tensor], str]) -> None:
        """``kind_of`` returns the kind of a new tensor."""
        super().__init__()
        self._kind_of = kind_of
        self._storages: dict[int, tuple[int, str]] = {}
        self._known: set[int] = set()
        self.live: Counter[str] = Counter()
        """Current bytes by kind."""
        self.peak: Counter[str] = Counter()

    def ignore(self, module: nn.Module) -> None:
        """Exclude parameters and buffers of ``module``, and views of them."""
        for tensor in (*module.parameters(), *module.buffers()):
            self._known.add(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._add(tensor)
        return result

    def rename(self, tensor: Tensor, kind: str) -> None:
        """Count the storage of ``tensor`` as ``kind`` from now on."""
        key = tensor.untyped_storage()._cdata
        if key in self._storages:
            size, before = self._storages[key]
            self.live[before] -= size
            self.live[kind] += size
            self._storages[key] = size, kind

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages or key in self._known:
            return
        size, kind = storage.nbytes(), self._kind_of(tensor)
        self._storages[key] = size, kind
        self.live[kind] += size
        weakref.finalize(storage, self._remove, key)
        if self.live.total() > self.peak.total():
            self.peak = self.live.copy()

    def _remove(self, key: int) -> None:
        size, kind = self._storages.pop(key)
        self.live[kind] -= size


def shapes_only(module: nn.Module) -> FakeTensorMode:
    """Give ``module``, built on the meta device, fake CPU tensors: kernels are chosen as on a CPU, but nothing is allocated.

    Returns:
        The mode within which code on the module must run.
    """
    mode = FakeTensorMode()
    fakes: dict[int, Tensor] = {}  # tied parameters stay tied
    with mode:
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    if id(parameter) not in fakes:
                        empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                        fakes[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                    part._parameters[name] = fakes[id(parameter)]  # type: ignore[assignment]
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return mode
