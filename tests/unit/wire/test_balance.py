"""Which server is asked next."""

from contextlib import ExitStack

import pytest

from nemo_style_rlhf.wire.balance import LeastBusy

SERVERS = "abc"


def one_after_the_other(balance: LeastBusy[str], count: int) -> str:
    """The servers of requests that end before the next one begins."""
    asked = ""
    for _ in range(count):
        with balance.take() as server:
            asked += server
    return asked


def test_ranks_that_ask_one_thing_at_a_time_ask_different_servers() -> None:
    """None knows what the others have under way."""
    ranks = [LeastBusy(SERVERS, rest_s=0.0, first=rank) for rank in range(4)]
    assert [one_after_the_other(rank, 4) for rank in ranks] == ["abca", "bcab", "cabc", "abca"]


def test_the_least_busy_is_asked_whoever_had_the_last_request() -> None:
    balance = LeastBusy(SERVERS, rest_s=0.0, first=0)
    with ExitStack() as long_ones:
        assert [long_ones.enter_context(balance.take()) for _ in range(2)] == ["a", "b"]
        assert one_after_the_other(balance, 3) == "ccc"
    assert one_after_the_other(balance, 1) == "a"


def test_one_that_failed_rests_and_then_gets_no_more_than_the_others() -> None:
    balance = LeastBusy(SERVERS, rest_s=0.0, first=0)
    resting = LeastBusy(SERVERS, rest_s=60.0, first=0)
    for each in (balance, resting):
        with pytest.raises(ConnectionError), each.take():
            raise ConnectionError
    assert one_after_the_other(resting, 4) == "bcbc"
    assert one_after_the_other(balance, 6) == "bcabca"
