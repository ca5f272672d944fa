"""Divides work over ranks, and exchanges the results."""

import itertools
import pickle
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_style_rlhf.errors import UserError

PATIENCE = timedelta(days=365)
"""Timeout of collectives: while one rank waits for a server or a slow rollout, the others must not give up."""
_FLAGS = itertools.count()
"""Numbers in the names of flags, the same on every rank."""
Part = TypeVar("Part")
Result = TypeVar("Result")


def require_tensor_parallel(ranks: int, size: int) -> None:
    """Check that ``ranks`` can be divided into tensor-parallel groups of ``size``.

    Raises:
        UserError: they cannot.
    """
    if ranks % size:
        raise UserError(
            f"generation.tensor_parallel_size={size} with {ranks} ranks of the actor, which it must divide: start more ranks, or "
            "lower it"
        )


class Ranks:
    """The ranks of ``init_distributed``; a single rank without that. Every rank makes the same calls.

    Neighboring ranks may form tensor-parallel groups. A group shares a generator, and its first rank leads it.
    """

    def __init__(self, *, tensor_parallel: int = 1, alone: bool = False) -> None:
        """Find this rank's place among the ranks.

        Args:
            alone: take this rank for the only one, in work of its own.
            tensor_parallel: number of ranks of a tensor-parallel group.

        Raises:
            UserError: the ranks cannot be divided into groups of that size.
        """
        together = dist.is_initialized() and not alone
        self.rank: int = dist.get_rank() if together else 0
        self.size: int = dist.get_world_size() if together else 1
        require_tensor_parallel(self.size, tensor_parallel)
        self.generators = self.size // tensor_parallel
        self.generator: int = self.rank // tensor_parallel
        self.leads = self.rank % tensor_parallel == 0
        # Not the models' group: it may be NCCL's, and gives up after half an hour.
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE) if self.size > 1 else None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def deal(self, count: int) -> list[range]:
        """Deal the numbers below ``count`` to the generators in turn."""
        return [range(first, count, self.generators) for first in range(self.generators)]

    def shard(self, parts: Sequence[Part]) -> Iterator[tuple[Part, bool]]:
        """The parts that this rank computes, each with a flag that says whether it counts.

        Every rank gets the same number of parts; extra ones, copies of the last, do not count. Without them, collectives inside a
        forward or backward pass would wait for ranks that have run out of parts.
        """
        return shard(parts, self.rank, self.size)

    def sum(self, tensor: Tensor) -> Tensor:
        """The elementwise sum over ranks of CPU tensors of one shape, in place; exact where all but one rank have 0."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather_flat(self, tensor: Tensor) -> list[Tensor]:
        """The CPU tensors [n] of all ranks, in order; their lengths may differ."""
        lengths = self.all_gather(len(tensor))
        parts = [tensor if rank == self.rank else tensor.new_empty(length) for rank, length in enumerate(lengths)]
        for rank, part in enumerate(parts if self.size > 1 else []):
            dist.broadcast(part, src=rank, group=self._group)
        return parts

    def flag(self) -> "Flag":
        """A flag that any rank can raise."""
        return Flag(f"nemo_style_rlhf/flag/{next(_FLAGS)}" if self.size > 1 else None)

    def all_gather(self, result: Result) -> list[Result]:
        """The results of all ranks, in order."""
        if self.size == 1:
            return [result]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, result, group=self._group)
        return gathered

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.all_gather(None)

    def from_first(self, value: Any) -> Any:
        """The value that the first rank passes.

        Each rank gets one part of it from the first and the others from each other, so that the first one does not send it as
        often as there are ranks.
        """
        if self.size == 1:
            return value
        content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8) if self.is_first else None
        length = torch.tensor(0 if content is None else len(content))
        dist.broadcast(length, src=0, group=self._group)
        own = torch.empty(-(-int(length) // self.size), dtype=torch.uint8)
        parts = None
        if content is not None:
            parts = list(torch.nn.functional.pad(content, (0, self.size * len(own) - len(content))).chunk(self.size))
        dist.scatter(own, parts, src=0, group=self._group)
        whole = own.new_empty(self.size * len(own))
        dist.all_gather_into_tensor(whole, own, group=self._group)
        return value if self.is_first else pickle.loads(memoryview(whole.numpy())[: int(length)])

    def scatter(self, values: Sequence[Any] | None) -> Any:
        """The value that the first rank passes for this rank; the other ranks pass None."""
        if self.size == 1:
            assert values is not None
            return values[0]
        box: list[Any] = [None]
        dist.scatter_object_list(box, None if values is None else list(values), src=0, group=self._group)
        return box[0]

    def gather(self, result: Result) -> list[Result]:
        """On the first rank the results of all ranks, in order; empty on the others."""
        if self.size == 1:
            return [result]
        gathered: list[Any] = [None] * self.size if self.is_first else []
        dist.gather_object(result, gathered if self.is_first else None, dst=0, group=self._group)
        return gathered

    def on_first(self, compute: Callable[[], Result]) -> Result:
        """Call ``compute`` on the first rank only, and return its result, or raise its error, on all."""
        return self.from_first(_outcome(compute) if self.is_first else None)()

    def everyone(self, compute: Callable[[], Result]) -> list[Result]:
        """Call ``compute`` on every rank, and return all results; an error on one rank is raised on all."""
        return [outcome() for outcome in self.all_gather(_outcome(compute))]

    def require_shared(self, folder: Path) -> None:
        """Check that all ranks share ``folder``.

        Raises:
            UserError: a rank does not see a file that the first rank writes into it.
        """
        marker = folder / f".seen-{self.from_first(secrets.token_hex(4))}"

        def look() -> None:
            if not marker.exists():
                raise UserError(
                    f"rank {self.rank} does not see what rank 0 writes into {folder}: give a run.output_dir on a file system "
                    "that all of its nodes share"
                )

        def leave() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            marker.touch()

        self.on_first(leave)
        try:
            self.everyone(look)
        finally:
            if self.is_first:
                marker.unlink()


class Flag:
    """A flag that all ranks see once one of them has raised it; asking does not wait for other ranks."""

    def __init__(self, name: str | None) -> None:
        self._store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store()) if name else None

    def raised(self, now: bool) -> bool:
        """True if the flag is raised; with ``now``, raise it first."""
        return now if self._store is None else self._store.add("raised", now) > 0


def shard(parts: Sequence[Part], rank: int, ranks: int) -> Iterator[tuple[Part, bool]]:
    """:meth:`Ranks.shard` of any rank."""
    for first in range(0, len(parts), ranks):
        own = first + rank
        yield parts[min(own, len(parts) - 1)], own < len(parts)


@dataclass
class _Returned(Generic[Result]):
    value: Result

    def __call__(self) -> Result:
        return self.value


@dataclass
class _Raised:
    error: Exception

    def __call__(self) -> NoReturn:
        raise self.error


def _outcome(compute: Callable[[], Result]) -> Callable[[], Result]:
    """A function that returns the result of ``compute`` or raises its error, and that can be sent to other ranks."""
    try:
        return _Returned(compute())
    except Exception as error:  # noqa: BLE001 every rank raises it
        return _Raised(error)
