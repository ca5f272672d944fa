"""Two ranks over gloo: the second handles exactly the messages that the first sends."""

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

from nemo_style_rlhf.critic_service.worker_group import OutOfStep, RankMessage, WorkerGroup
from nemo_style_rlhf.engine.engine import NonFiniteError
from tests.support.gloo import on_ranks

pytestmark = pytest.mark.slow("starts ranks")


@dataclass(frozen=True)
class Gather(RankMessage[list[int]]):
    number: int


@dataclass(frozen=True)
class Double(RankMessage[int]):
    number: int


@dataclass(frozen=True)
class Overflow(RankMessage[None]):
    """Raises NonFiniteError on all ranks."""


@dataclass(frozen=True)
class FillDisk(RankMessage[None]):
    """Raises OSError on the first rank."""


@dataclass(frozen=True)
class Unknown(RankMessage[None]):
    """Has no handler."""


def serve() -> tuple[list[RankMessage], list[list[int]]]:
    """The messages that this rank handled, and the answers on the first."""
    group, seen, answers = WorkerGroup(), [], []

    def gather(message: Gather) -> list[int]:
        seen.append(message)
        return group.all_gather(message.number + group.rank)

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
        with pytest.raises(OutOfStep if group.size > 1 else OSError):
            group.run(FillDisk())
        answers.append(group.run(Gather(20)))
        answers.append(group.run_each([Double(10 + number) for number in range(group.size)]))
        group.dismiss()
    else:
        group.follow()
    return seen, answers


@pytest.mark.parametrize("size", [1, 2])
def test_each_message_is_handled_on_every_rank_and_an_unknown_one_is_not_sent(size: int, tmp_path: Path) -> None:
    outcomes = on_ranks(size, tmp_path, serve)
    messages = [Gather(10), Overflow(), FillDisk(), Gather(20)]
    assert [seen for seen, _ in outcomes] == [messages] * size
    answers = [[start + rank for rank in range(size)] for start in (10, 20)] + [[20, 22][:size]]
    assert outcomes[0][1] == answers
