"""Ranks, what they exchange, and the tensor-parallel size."""

from pathlib import Path

import pytest

from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.errors import UserError
from tests.support.gloo import on_ranks

pytestmark = pytest.mark.slow("starts ranks")

VALUES = [None, 7, {"long": "text " * 10_000}, b"1234"]


def test_ranks_that_no_tensor_parallel_size_divides_are_refused():
    with pytest.raises(
        UserError, match=r"generation\.tensor_parallel_size=2 with 1 ranks of the actor, which it must divide"
    ):
        Ranks(tensor_parallel=2)


def exchange() -> tuple[bool, str, list[dict[str, int]]]:
    ranks = Ranks()
    told = [ranks.from_first(value if ranks.is_first else None) for value in VALUES]
    texts = [f"for rank {number}" * 10**number for number in range(ranks.size)]
    return told == VALUES, ranks.scatter(texts if ranks.is_first else None), ranks.gather({"rank": ranks.rank})


@pytest.mark.parametrize("size", [1, 3])
def test_what_ranks_exchange_arrives_whole(size: int, tmp_path: Path) -> None:
    for rank, (whole, own, gathered) in enumerate(on_ranks(size, tmp_path, exchange)):
        assert whole
        assert own == f"for rank {rank}" * 10**rank
        assert gathered == ([{"rank": number} for number in range(size)] if rank == 0 else [])
