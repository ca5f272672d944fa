"""The form of what goes over the wire."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.critic_service.protocol import Code, ProtocolError
from tests.unit.critic_service.batches import train_inputs


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_ragged_is_undone_by_unragged(lengths: list[int]) -> None:
    sequences = [np.arange(length, dtype=np.int32) for length in lengths]
    flat = protocol.ragged(sequences)
    back = protocol.unragged(flat["tokens"], flat["sequence_lengths"])
    assert [sequence.tolist() for sequence in back] == [sequence.tolist() for sequence in sequences]


def test_errors_survive_the_wire() -> None:
    for code in Code:
        parsed = ProtocolError.parse(str(ProtocolError(code, "a sentence")))
        assert (parsed.code, parsed.message) == (code, "a sentence")
    assert ProtocolError.parse("what Triton says").code is Code.INVALID


def test_the_digest_of_a_step_does_not_depend_on_its_parts() -> None:
    whole = tuple(train_inputs()[spec.name] for spec in protocol.TRAIN.inputs[:5])
    first = tuple(array[:size] for array, size in zip(whole, (2, 1, 2, 2, 2), strict=True))
    second = tuple(array[size:] for array, size in zip(whole, (2, 1, 2, 2, 2), strict=True))
    digest = protocol.train_digest([whole], [[0, 1]], [2])
    assert protocol.train_digest([first, second], [[0, 1]], [2]) == digest
    assert protocol.train_digest([second, first], [[0, 1]], [2]) != digest
    assert protocol.train_digest([whole], [[1, 0]], [2]) != digest
