"""Runs a function on ranks of their own process group."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

JOIN_S = 120


def on_ranks(size: int, folder: Path, compute: Callable[[], Any]) -> list[Any]:
    """The results of all ranks, in order. They must be small: nobody reads them before all ranks have ended.

    Args:
        folder: a new one, where the ranks meet.
        compute: a function of a module.
    """
    context = multiprocessing.get_context("spawn")  # a worker of pytest may have a process group by now
    outcome: Any = context.SimpleQueue()
    ranks = [
        context.Process(target=_rank, args=(rank, size, folder, compute, outcome), daemon=True) for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(JOIN_S)
            assert rank.exitcode == 0
    finally:
        for rank in ranks:
            rank.kill()
    return [result for _, result in sorted((outcome.get() for _ in ranks), key=lambda each: each[0])]


def _rank(rank: int, size: int, folder: Path, compute: Callable[[], Any], outcome: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    result = compute()
    dist.destroy_process_group()  # else its threads may outlive it while Python ends, which aborts the process
    outcome.put((rank, result))
