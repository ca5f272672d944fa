"""Two ranks over gloo: the second handles exactly the messages that the first sends."""

import errno
import multiprocessing
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed as dist

from nemo_style_rlhf.critic_service.worker_group import Message, OutOfStep, WorkerGroup
from nemo_style_rlhf.engine.engine import NonFiniteError


@dataclass(frozen=True)
class Gather(Message[list[int]]):
    number: int


@dataclass(frozen=True)
class Double(Message[int]):
    number: int


@dataclass(frozen=True)
class Overflow(Message[None]):
    """Raises NonFiniteError on all ranks."""


@dataclass(frozen=True)
class FillDisk(Message[None]):
    """Raises OSError on the first rank."""


@dataclass(frozen=True)
class Unknown(Message[None]):
    """Has no handler."""


def serve(
    rank: int, size: int, folder: Path, outcome: "SimpleQueue[tuple[int, list[Message], list[list[int]]]]"
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    group, seen, answers = WorkerGroup(), [], []

    def gather(message: Gather) -> list[int]:
        seen.append(message)
        return group.all_gather(message.number + rank)

    def overflow(message: Overflow) -> NoReturn:
        seen.append(message)
        raise NonFiniteError("the loss is nan")

    def fill_disk(message: FillDisk) -> None:
        seen.append(message)
        if group.is_first:
            raise OSError(errno.ENOSPC, "No space left on device")

    group.join({Gather: gather, Overflow: overflow, Double: lambda message: 2 * message.number})
    group.join({FillDisk: fill_disk})
    if group.is_first:
        answers.append(group.run(Gather(10)))
        with pytest.raises(TypeError, match="handles Unknown"):
            group.run(Unknown())
        with pytest.raises(NonFiniteError):
            group.run(Overflow())
        with pytest.raises(OutOfStep if size > 1 else OSError):
            group.run(FillDisk())
        answers.append(group.run(Gather(20)))
        answers.append(group.run_each([Double(10 + number) for number in range(size)]))
        group.dismiss()
    else:
        group.follow()
    dist.destroy_process_group()  # else its threads may outlive it while Python ends, which aborts the process
    outcome.put((rank, seen, answers))


@pytest.mark.parametrize("size", [1, 2])
def test_each_message_is_handled_on_every_rank_and_an_unknown_one_is_not_sent(size: int, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")  # a worker of pytest may have a process group by now
    outcome = context.SimpleQueue()
    ranks = [context.Process(target=serve, args=(rank, size, tmp_path, outcome), daemon=True) for rank in range(size)]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(120)
            assert rank.exitcode == 0
    finally:
        for rank in ranks:
            rank.kill()
    messages = [Gather(10), Overflow(), FillDisk(), Gather(20)]
    outcomes = sorted(outcome.get() for _ in ranks)
    assert [(rank, seen) for rank, seen, _ in outcomes] == [(rank, messages) for rank in range(size)]
    assert outcomes[0][2] == [[start + rank for rank in range(size)] for start in (10, 20)] + [[20, 22][:size]]
