"""Ranks and the tensor-parallel size."""

import pytest

from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.errors import UserError


def test_ranks_that_no_tensor_parallel_size_divides_are_refused():
    with pytest.raises(
        UserError, match=r"generation\.tensor_parallel_size=2 with 1 ranks of the actor, which it must divide"
    ):
        Ranks(tensor_parallel=2)
