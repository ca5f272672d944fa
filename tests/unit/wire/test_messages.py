"""The form of what goes over the wire to every server."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nemo_style_rlhf.wire import messages
from nemo_style_rlhf.wire.messages import Code, ProtocolError


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_ragged_is_undone_by_unragged(lengths: list[int]) -> None:
    sequences = [np.arange(length, dtype=np.int32) for length in lengths]
    flat = messages.ragged(sequences)
    back = messages.unragged(flat["tokens"], flat["sequence_lengths"])
    assert [sequence.tolist() for sequence in back] == [sequence.tolist() for sequence in sequences]


def test_errors_survive_the_wire() -> None:
    for code in Code:
        parsed = ProtocolError.parse(str(ProtocolError(code, "a sentence")))
        assert (parsed.code, parsed.message) == (code, "a sentence")
    assert ProtocolError.parse("what the backend says").code is Code.INVALID
