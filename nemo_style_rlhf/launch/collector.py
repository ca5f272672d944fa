"""Makes Python look for garbage rarely. An import makes many objects that stay and hardly any garbage: repeated searches took a
tenth of its time. Standard library only."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

USUAL = gc.get_threshold()
RARELY = (100_000, 100, 100)


def collect_rarely() -> None:
    """Collect rarely in a program that begins with its imports, until :func:`collect_as_usual`."""
    gc.set_threshold(*RARELY)


def collect_as_usual() -> None:
    """Leave everything that has been made so far out of all later collections."""
    _freeze()
    gc.set_threshold(*USUAL)


@contextmanager
def importing() -> Iterator[None]:
    """Context for a large import in the middle of a program."""
    before = gc.get_threshold()
    collect_rarely()
    try:
        yield
    finally:
        _freeze()
        gc.set_threshold(*before)


def _freeze() -> None:
    """Like gc.freeze, but the interpreter's own last collection sees all: without it, libraries report what is left as leaks."""
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)


@contextmanager
def leaving_garbage() -> Iterator[None]:
    """Context for calls of other libraries that collect garbage at once, among everything that was ever imported: what they leave
    waits for the next collection, or for the end of the process."""
    collect = gc.collect
    gc.collect = lambda *_, **__: 0  # type: ignore[assignment]
    try:
        yield
    finally:
        gc.collect = collect
