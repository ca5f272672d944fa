"""Samples over ranks: which rank computes what, and how the others come to know."""

import itertools
import pickle
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import torch.distributed as dist

from nemo_style_rlhf.errors import UserError

PATIENCE = timedelta(days=365)
"""While one rank waits for a server or a slow rollout the others must not give up."""
_STORES = itertools.count()
"""Numbers for their names, the same on every rank."""
Part = TypeVar("Part")
Result = TypeVar("Result")


def require_teams(ranks: int, team: int) -> None:
    """
    Raises:
        UserError: ``ranks`` cannot be divided into teams of ``team``.
    """
    if ranks % team:
        raise UserError(
            f"generation.tensor_parallel_size={team} with {ranks} ranks of the actor, which it must divide: start more ranks, or "
            "lower it"
        )


class Ranks:
    """Those of ``bootstrap.init_distributed``; without that, one. Every rank makes the same calls.

    Neighbours may form teams, which sample as one: a tensor-parallel group that shares a generator. The first of a team leads.
    """

    def __init__(self, *, team: int = 1) -> None:
        """
        Args:
            team: ranks of a team.

        Raises:
            UserError: the ranks cannot be divided into such teams.
        """
        self.rank: int = dist.get_rank() if dist.is_initialized() else 0
        self.size: int = dist.get_world_size() if dist.is_initialized() else 1
        require_teams(self.size, team)
        self.teams = self.size // team
        self.team: int = self.rank // team
        self.leads = self.rank % team == 0
        # Not the models' group: that may be NCCL's, and gives up after half an hour.
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE) if self.size > 1 else None
        self._team_group = dist.new_subgroups(team, backend="gloo", timeout=PATIENCE)[0] if team > 1 else None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, parts: Sequence[Part]) -> Iterator[tuple[Part, bool]]:
        """What this rank computes of ``parts``, as many on every rank, and whether it counts: an extra one does not.

        Collectives inside a forward or backward pass would otherwise wait for ranks that have run out of parts.
        """
        for first in range(0, len(parts), self.size):
            own = first + self.rank
            yield (parts[own], True) if own < len(parts) else (parts[0], False)

    def queue(self, count: int, *, dealt: int) -> Iterator[int]:
        """This team's of the numbers below ``count``: the first ``dealt`` in turn, each later one goes to whoever asks for it."""
        if self.teams == 1:
            yield from range(count)
            return
        store = self._new_store()
        yield from range(self.team, min(dealt, count), self.teams)
        while (number := dealt + store.add("taken", 1) - 1) < count:
            yield number

    def groups(self, sizes: Sequence[int]) -> "Groups[Any]":
        """Groups of ``sizes`` whose members are made by any rank."""
        return Groups(sizes, self._new_store() if self.size > 1 else None)

    def tally(self) -> "Tally":
        """A sum to which every rank adds."""
        return Tally(self._new_store() if self.size > 1 else None)

    def _new_store(self) -> dist.Store:
        """One that the ranks share, empty."""
        return dist.PrefixStore(f"nemo_style_rlhf/{next(_STORES)}", dist.distributed_c10d._get_default_store())

    def gather(self, result: Result) -> list[Result]:
        """On the first rank those of all ranks, in order; on the others nothing."""
        if self.size == 1:
            return [result]
        gathered: list[Any] | None = [None] * self.size if self.is_first else None
        dist.gather_object(result, gathered, dst=0, group=self._group)
        return gathered or []

    def all_gather(self, result: Result) -> list[Result]:
        """Those of all ranks, in order."""
        if self.size == 1:
            return [result]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, result, group=self._group)
        return gathered

    def barrier(self) -> None:
        """Go on when all ranks are here."""
        self.all_gather(None)

    def from_first(self, value: Any) -> Any:
        """The first rank's."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def from_leader(self, compute: Callable[[], Result]) -> Result:
        """What ``compute`` returns on the first rank of this team, where alone it is called."""
        if self._team_group is None:
            return compute()
        box = [compute() if self.leads else None]
        dist.broadcast_object_list(box, group=self._team_group, group_src=0)
        return box[0]  # type: ignore[return-value]

    def on_first(self, compute: Callable[[], Result]) -> Result:
        """What ``compute`` returns or raises on the first rank, where alone it is called."""
        return self.from_first(_outcome(compute) if self.is_first else None)()

    def everyone(self, compute: Callable[[], Result]) -> list[Result]:
        """What ``compute`` returns on each rank; what it raises on one is raised on all."""
        return [outcome() for outcome in self.all_gather(_outcome(compute))]

    def require_shared(self, folder: Path) -> None:
        """
        Raises:
            UserError: a rank does not see what the first writes into ``folder``.
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


class Tally:
    """A sum over ranks, as it is at this moment."""

    def __init__(self, store: dist.Store | None) -> None:
        self._store = store
        self._own = 0

    def add(self, amount: int) -> int:
        """The sum, with ``amount`` in it."""
        self._own += amount
        return self._own if self._store is None else self._store.add("sum", amount)


class Groups(Generic[Part]):
    """Whoever adds the last member of a group has the whole group, those of other ranks included."""

    def __init__(self, sizes: Sequence[int], store: dist.Store | None) -> None:
        self._sizes = sizes
        self._store = store
        self._own: dict[int, dict[int, Part]] = {}

    def add(self, group: int, row: int, member: Part) -> list[Part] | None:
        """The members of ``group`` by row, now that it is complete; None before, and on the other ranks."""
        own = self._own.setdefault(group, {})
        own[row] = member
        rows = range(self._sizes[group])
        if self._store is None:
            return [own[row] for row in rows] if len(own) == len(rows) else None
        self._store.set(f"{group}/{row}", pickle.dumps(member))
        if self._store.add(f"{group}", 1) < len(rows):
            return None
        whole = [own[row] if row in own else pickle.loads(self._store.get(f"{group}/{row}")) for row in rows]
        for key in (f"{group}", *(f"{group}/{row}" for row in rows)):
            self._store.delete_key(key)
        return whole


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
    """Returns or raises what ``compute`` did; it can be sent to other ranks."""
    try:
        return _Returned(compute())
    except Exception as error:  # noqa: BLE001 every rank raises it
        return _Raised(error)
