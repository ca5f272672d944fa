"""The client's account of its own calls."""

import pytest

from nemo_style_rlhf.critic_service.remote_critic import busy_span


@pytest.mark.parametrize(
    ("spans", "busy"),
    [([(1, 2)], 1), ([(1, 4), (2, 3)], 3), ([(5, 6), (1, 3), (2, 4)], 4), ([(1, 2), (2, 3)], 2)],
)
def test_calls_beside_each_other_count_once_and_pauses_not_at_all(spans, busy):
    assert busy_span(spans) == (min(start for start, _ in spans), max(end for _, end in spans), busy)
