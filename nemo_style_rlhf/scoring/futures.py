"""Combinators of futures."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

Source = TypeVar("Source")
Result = TypeVar("Result")
Error = TypeVar("Error", bound=Exception)
_LOCK = threading.Lock()


def mapped(source: "Future[Source]", function: Callable[[Source], Result]) -> "Future[Result]":
    """A future of ``function(source.result())``; it carries errors of ``source`` and of ``function``."""
    return gathered([source], lambda results: function(results[0]))


def caught(source: "Future[Source]", *kinds: type[Error]) -> "Future[Source | Error]":
    """A future of ``source.result()``, or of the error of ``source`` as a value if the error is one of ``kinds``."""
    result: Future[Source | Error] = Future()

    def settle(_: "Future[Source]") -> None:
        try:
            result.set_result(source.result())
        except kinds as error:
            result.set_result(error)
        except BaseException as error:  # noqa: BLE001 the future carries it
            result.set_exception(error)

    source.add_done_callback(settle)
    return result


def gathered(sources: "Sequence[Future[Any]]", function: Callable[[list[Any]], Result]) -> "Future[Result]":
    """A future of ``function([every result])``, set once all ``sources`` (at least one) are done; it carries the first error in
    their order."""
    result: Future[Result] = Future()
    missing = len(sources)

    def finish(_: "Future[Any]") -> None:
        nonlocal missing
        with _LOCK:
            missing -= 1
            if missing:
                return
        try:
            result.set_result(function([source.result() for source in sources]))
        except BaseException as error:  # noqa: BLE001 the future carries it
            result.set_exception(error)

    for source in sources:
        source.add_done_callback(finish)
    return result
