"""The process group of a single rank, without a listening port.

A group of gloo listens at the host's address even if it has one rank. Any user of the host may connect, and torch aborts the
process once its descriptors are used up.
"""

from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup  # copies inputs to outputs: right for one rank

ALONE = "alone"


def init_alone(backend: str) -> None:
    """Make the process group of this process, unless it has one. If ``backend``, or later a library that makes a group from it,
    asks for gloo, it gets a group that listens on no port instead."""
    if dist.is_initialized():
        return
    dist.Backend.register_backend(ALONE, _group, devices=["cpu"])
    new_group = dist.new_group

    def new_group_alone(
        ranks: Any = None, timeout: Any = None, backend: str | None = None, *rest: Any, **named: Any
    ) -> Any:
        return new_group(ranks, timeout, _without_gloo(backend), *rest, **named)

    dist.new_group = new_group_alone
    # Without a rendezvous nothing races for a port, and child processes inherit no variables.
    dist.init_process_group(_without_gloo(backend), store=dist.HashStore(), rank=0, world_size=1)


def _without_gloo(backend: str | None) -> str | None:
    return ALONE if backend == dist.Backend.GLOO else backend


def _group(_store: dist.Store, rank: int, size: int, _timeout: Any) -> FakeProcessGroup:
    assert size == 1, f"{ALONE} is for one rank, not for {size}"
    return FakeProcessGroup._create_internal(rank, size)
