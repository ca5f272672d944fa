"""Sends files from a trainer to all of its engines at once, in a torch.distributed group of their own.

The group meets through a file in a folder that all hosts share. Like the group of the trainer's ranks it knows no token and does
not encrypt: use it only on networks without eavesdroppers. It is tested with gloo. With nccl the same code moves the bytes
between GPUs; this is not tested. torch's watchdog then ends a process whose group breaks.
"""

import re
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

BACKENDS = ("gloo", "nccl")
TIMEOUT = timedelta(seconds=30)
"""Longest wait for all members, and for one file."""
PREFIX = "group-"
NAME = re.compile(PREFIX + "[0-9a-f]{16}")


class Groups:
    """The last group of a process, kept as long as its members stay."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is where the members meet."""
        self._folder = folder
        self._last: tuple[str, Group] | None = None

    def meet(self, name: str, rank: int, size: int, backend: str) -> "Group":
        """The group ``name``, new if it is not the last one; raises the errors of :class:`Group`."""
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next one takes memory
            self._last = name, Group(self._folder / name, rank, size, backend)
        return self._last[1]

    def forget(self) -> None:
        self._last = None


class Group:
    """A trainer, rank 0, and its engines."""

    def __init__(self, file: Path, rank: int, size: int, backend: str) -> None:
        """Meet the others at ``file``.

        Raises:
            RuntimeError: they do not all come in time.
        """
        store = dist.FileStore(str(file), size)
        self._device, self._stream = torch.device("cpu"), None
        if backend == "nccl":
            self._device, self._stream = torch.device("cuda", torch.cuda.current_device()), torch.cuda.Stream()
            self._group = dist.ProcessGroupNCCL(store, rank, size, TIMEOUT)  # type: ignore[arg-type]
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, TIMEOUT)

    def send(self, path: Path) -> None:
        """Send a file to the engines. Each must :meth:`receive` it.

        Raises:
            RuntimeError: one of them has gone.
        """
        self._broadcast(torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8))

    def receive(self, size: int) -> bytearray:
        """Receive a file of ``size`` bytes.

        Raises:
            RuntimeError: the trainer or another engine has gone.
        """
        return bytearray(self._broadcast(torch.empty(size, dtype=torch.uint8)).numpy())

    def _broadcast(self, content: Tensor) -> Tensor:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with torch.cuda.stream(self._stream):  # apart from training, which continues meanwhile; no effect without a GPU
            moved = content.to(self._device)
            self._group.broadcast([moved], options).wait()
            return moved.cpu()
