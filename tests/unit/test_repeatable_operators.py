"""tests/support/operators.py takes those operators for raising on a GPU of which torch documents it."""

import pytest
import torch

from tests.support.operators import RAISES, documented, raising

FLOATS, WHOLE = torch.ones(3), torch.ones(3, dtype=torch.int64)


def test_every_operator_that_torch_documents_is_known() -> None:
    assert documented() == {*RAISES}


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "raises"),
    [
        ("cumsum", (FLOATS, 0), {}, True),
        ("cumsum", (WHOLE, 0), {}, False),
        ("cumsum", (WHOLE, 0), {"dtype": torch.float32}, True),
        ("bincount", (WHOLE,), {}, False),
        ("bincount", (WHOLE, FLOATS), {}, True),
        ("scatter_reduce", (FLOATS, 0, WHOLE, FLOATS, "prod"), {}, True),
        ("scatter_reduce", (FLOATS, 0, WHOLE, FLOATS, "sum"), {}, False),
        ("nll_loss_forward", (FLOATS, WHOLE), {}, True),
        ("mm", (FLOATS, FLOATS), {}, False),
    ],
)
def test_a_call_is_judged_by_its_arguments(name, args, kwargs, raises) -> None:
    assert raising(name, args, kwargs) == raises
