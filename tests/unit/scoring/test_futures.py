"""Futures that depend on others, and work that nobody does before it is asked for."""

import weakref
from concurrent.futures import CancelledError, Future

import pytest

from nemo_style_rlhf.scoring.futures import InlineExecutor, caught, gathered, mapped, resolved


def test_results_are_gathered_in_the_order_of_their_sources():
    sources = [Future() for _ in range(3)]
    whole = gathered(sources, "".join)
    for number in (2, 0, 1):
        assert not whole.done()
        sources[number].set_result("abc"[number])
    assert whole.result(0) == "abc"
    assert gathered([], len).result(0) == 0


def test_the_first_error_in_order_is_carried_and_no_later_source_is_waited_for():
    first, second, last = (Future() for _ in range(3))
    whole = gathered([first, second, last], list)
    second.set_exception(ValueError("second"))
    assert not whole.done()  # the first may fail, too
    first.set_result(1)
    with pytest.raises(ValueError, match="second"):
        whole.result(0)
    last.set_exception(KeyError("last"))
    assert isinstance(whole.exception(0), ValueError)


def test_a_future_does_not_keep_its_sources_alive():
    source = Future()
    whole, seen = mapped(source, len), weakref.ref(source)
    source.set_result("result")
    del source
    assert seen() is None and whole.result(0) == 6


def test_a_cancelled_source_is_an_error():
    source, known = Future(), resolved(1)
    whole, reciprocal = gathered([known, source], list), mapped(resolved(0), lambda value: 1 / value)
    source.cancel()
    with pytest.raises(CancelledError):
        whole.result(0)
    with pytest.raises(ZeroDivisionError):
        reciprocal.result(0)


def test_only_the_named_kinds_of_errors_are_values():
    value, other = Future(), Future()
    found = caught(value, ValueError), caught(other, ValueError)
    value.set_exception(ValueError("value"))
    other.set_exception(KeyError("other"))
    assert isinstance(found[0].result(0), ValueError)
    with pytest.raises(KeyError):
        found[1].result(0)


def test_work_without_a_thread_is_done_in_order_up_to_the_result_that_is_asked_for():
    executor, done = InlineExecutor(), []

    def work(name: str) -> str:
        done.append(name)
        if name == "b":
            raise ValueError(name)
        return name * 2

    a, b, c, d = (executor.submit(work, name) for name in "abcd")
    assert not done and not a.done()
    assert c.result() == "cc" and done == ["a", "b", "c"]
    assert (a.done(), d.done()) == (True, False)
    with pytest.raises(ValueError, match="b"):
        b.result()
    assert [each.result() for each in (a, c, d)] == ["aa", "cc", "dd"] and done == ["a", "b", "c", "d"]


def test_cancelled_work_is_not_done_and_does_not_hold_up_what_follows():
    executor, done = InlineExecutor(), []
    a, b, c = (executor.submit(done.append, name) for name in "abc")
    a.cancel()
    assert b.exception() is None and done == ["b"]
    executor.shutdown(cancel_futures=True)
    with pytest.raises(CancelledError):
        c.result()
    assert done == ["b"]


def test_an_interrupt_ends_the_thread_that_works():
    def interrupted() -> None:
        raise KeyboardInterrupt

    executor = InlineExecutor()
    future = executor.submit(interrupted)
    with pytest.raises(KeyboardInterrupt):
        executor.submit(len, "").result()
    assert isinstance(future.exception(0), KeyboardInterrupt)
