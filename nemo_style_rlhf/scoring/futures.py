"""Futures of scores: combinators, and an executor without a thread."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeVar

Source = TypeVar("Source")
Result = TypeVar("Result")
Error = TypeVar("Error", bound=Exception)
_LOCK = threading.Lock()


def resolved(result: Result) -> "Future[Result]":
    """A future that has its result."""
    future: Future[Result] = Future()
    future.set_result(result)
    return future


def settle(future: "Future[Result]", work: Callable[[], Result]) -> None:
    """Do ``work`` now, and give its result or its error to ``future``."""
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
        if not isinstance(error, Exception):  # the process is told to end
            raise


def mapped(source: "Future[Source]", function: Callable[[Source], Result]) -> "Future[Result]":
    """A future of ``function(source.result())``; it carries errors of ``source`` and of ``function``."""
    return gathered([source], lambda results: function(results[0]))


def caught(source: "Future[Source]", *kinds: type[Error]) -> "Future[Source | Error]":
    """A future of ``source.result()``, or of the error of ``source`` as a value if the error is one of ``kinds``."""
    result: Future[Source | Error] = Future()

    def outcome() -> Source | Error:
        try:
            return source.result()
        except kinds as error:
            return error

    source.add_done_callback(lambda _: settle(result, outcome))
    return result


def gathered(sources: "Sequence[Future[Any]]", function: Callable[[list[Any]], Result]) -> "Future[Result]":
    """A future of ``function([every result])``. It carries the first error in the order of ``sources``, as soon as that error
    and all results before it are there."""
    result: Future[Result] = Future()
    missing, done = deque(sources), list[Future[Any]]()

    def advance(_: "Future[Any] | None" = None) -> None:
        with _LOCK:
            while missing and missing[0].done():
                done.append(missing.popleft())
                if done[-1].cancelled() or done[-1].exception() is not None:
                    missing.clear()
            if missing or result.running() or result.done():
                return
            result.set_running_or_notify_cancel()
        settle(result, lambda: function([source.result() for source in done]))
        done.clear()  # sources refer to this function; it must not keep them alive

    advance()
    for source in sources:
        source.add_done_callback(advance)
    return result


class InlineExecutor(Executor):
    """Has no thread: the thread that asks for a result does the submitted work, in order, up to that result."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, work: Callable[..., Result], /, *args: Any, **kwargs: Any) -> "Future[Result]":
        future: Future[Result] = _Inline(self._run_until)
        self._waiting.append((future, partial(work, *args, **kwargs)))
        return future

    def _run_until(self, wanted: "Future[Any]") -> None:
        while not wanted.done():
            future, work = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                settle(future, work)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """With ``cancel_futures``, cancel the work that is left. Nothing else is under way here."""
        for future, _ in self._waiting if cancel_futures else ():
            future.cancel()


class _Inline(Future[Result]):
    """A future whose :meth:`result` and :meth:`exception` first do the work."""

    def __init__(self, make: Callable[["Future[Any]"], None]) -> None:
        super().__init__()
        self._make = make

    def result(self, timeout: float | None = None) -> Result:
        self._make(self)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._make(self)
        return super().exception(timeout)
