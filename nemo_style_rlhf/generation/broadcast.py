"""Sends files from a trainer to all of its engines at once, in a torch.distributed group of their own.

The group meets through a file in a folder that all hosts share. Like the group of the trainer's ranks it knows no token: only for
networks on which nobody else may listen. Tested with gloo; with nccl the same code moves the bytes between GPUs, untested.
"""

import re
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

BACKENDS = ("gloo", "nccl")
TIMEOUT = timedelta(seconds=30)
"""For the group to meet, and for one file."""
PREFIX = "group-"
NAME = re.compile(PREFIX + "[0-9a-f]{16}")


class Groups:
    """The last group of a process, which goes on as long as its members stay."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is where the members meet."""
        self._folder = folder
        self._last: tuple[str, Group] | None = None

    def meet(self, name: str, rank: int, size: int, backend: str) -> "Group":
        """The group ``name``, new if it is not the last one; errors are those of :class:`Group`."""
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
        self._device = torch.device("cpu")
        if backend == "nccl":
            self._device = torch.device("cuda", torch.cuda.current_device())
            self._group = dist.ProcessGroupNCCL(store, rank, size, TIMEOUT)  # type: ignore[arg-type]
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, TIMEOUT)

    def send(self, path: Path) -> None:
        """Send a file to the engines, which all :meth:`receive` it.

        Raises:
            RuntimeError: one of them has gone.
        """
        self._broadcast(torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8).to(self._device))

    def receive(self, size: int) -> bytearray:
        """
        Args:
            size: bytes of the file.

        Raises:
            RuntimeError: the trainer or another engine has gone.
        """
        content = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._broadcast(content)
        return bytearray(content.cpu().numpy())

    def _broadcast(self, content: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([content], options).wait()
        if content.is_cuda:
            torch.cuda.synchronize()  # wait() only orders streams
