"""Ranks, what they exchange, and the tensor-parallel size."""

import multiprocessing
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest
import torch.distributed as dist

from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.errors import UserError

VALUES = [None, 7, {"long": "text " * 10_000}, b"1234"]


def test_ranks_that_no_tensor_parallel_size_divides_are_refused():
    with pytest.raises(
        UserError, match=r"generation\.tensor_parallel_size=2 with 1 ranks of the actor, which it must divide"
    ):
        Ranks(tensor_parallel=2)


def exchange(rank: int, size: int, folder: Path, outcome: "SimpleQueue[tuple[int, object, object, object]]") -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    ranks = Ranks()
    told = [ranks.from_first(VALUES[number] if rank == 0 else None) for number in range(len(VALUES))]
    own = ranks.scatter([f"for rank {number}" * 10**number for number in range(size)] if rank == 0 else None)
    gathered = ranks.gather({"rank": rank})
    dist.destroy_process_group()  # else its threads may outlive it while Python ends, which aborts the process
    outcome.put((rank, told == VALUES, own, gathered))


@pytest.mark.parametrize("size", [1, 3])
def test_what_ranks_exchange_arrives_whole(size: int, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")  # a worker of pytest may have a process group by now
    outcome = context.SimpleQueue()
    children = [
        context.Process(target=exchange, args=(rank, size, tmp_path, outcome), daemon=True) for rank in range(size)
    ]
    for child in children:
        child.start()
    try:
        for child in children:
            child.join(120)
            assert child.exitcode == 0
    finally:
        for child in children:
            child.kill()
    found = sorted((outcome.get() for _ in children), key=lambda each: each[0])
    for rank, (_, whole, own, gathered) in enumerate(found):
        assert whole
        assert own == f"for rank {rank}" * 10**rank
        assert gathered == ([{"rank": number} for number in range(size)] if rank == 0 else [])
