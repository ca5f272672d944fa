"""Ctrl-C: the process ends at once and says in one sentence where it stood.

SIGINT is blocked in every thread, and so in every child process, which a terminal would interrupt as well; one thread waits for
it. A main thread that is deep in a kernel or a collective cannot delay it, and no library can swallow it.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import resource_tracker

INTERRUPTED_EXIT = 130
"""Exit code of a process that Ctrl-C ended: 128 + SIGINT, as shells count."""
SHOW_CURSOR = "\x1b[?25h"
"""A progress bar may have hidden it."""

_listener: threading.Thread | None = None
_standing: Callable[[], str] = lambda: "stopped; the same command starts again"  # noqa: E731


def listen() -> None:
    """From now on a SIGINT ends the process with ``INTERRUPTED_EXIT`` and the sentence of :func:`describe`; not where it was
    started to ignore it, as a job in the background is."""
    global _listener
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        _listener = threading.Thread(target=_wait, name="ctrl-c", daemon=True)
        _listener.start()


def keep_from_children() -> None:
    """multiprocessing lets SIGINT through again once it has started its tracker of semaphores, so it starts that here."""
    if _listener is not None:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def describe(standing: Callable[[], str]) -> None:
    """From now on ``standing`` gives the sentence. It is called in another thread, and must only look."""
    global _standing
    _standing = standing


def on_first(action: Callable[[], None]) -> None:
    """The first SIGINT calls ``action``, in another thread, and ends nothing; the second one ends the process."""
    _actions.insert(0, action)


def as_exception() -> None:
    """The first SIGINT raises KeyboardInterrupt in the main thread, for work that must be undone; the second ends the process.

    SIGUSR2 carries it there: Python's own ``interrupt_main`` would wait until the main thread has stopped waiting.
    """
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.signal(signal.SIGUSR2, signal.default_int_handler)
    on_first(lambda: signal.pthread_kill(main_thread, signal.SIGUSR2))


def hand_over() -> None:
    """Let SIGINT through again, to a handler of the caller's."""
    global _listener
    if _listener is not None:
        listener, _listener = _listener, None
        assert listener.ident is not None
        signal.pthread_kill(listener.ident, signal.SIGINT)
        listener.join()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _wait() -> None:
    while True:
        signal.sigwait({signal.SIGINT})
        if threading.current_thread() is not _listener:
            return
        action = _actions.pop(0) if len(_actions) > 1 else _actions[0]
        threading.Thread(target=action, daemon=True).start()  # not here: a second SIGINT must find this thread waiting


def end() -> None:
    """End the process as a SIGINT does, with its children and theirs, whom the terminal's SIGINT does not reach."""
    import psutil  # not at the top: this file is read before it is known which Python runs it

    try:
        for child in multiprocessing.active_children():
            with suppress(psutil.NoSuchProcess):
                for process in [*psutil.Process(child.pid).children(recursive=True), child]:
                    process.kill()
        if os.environ.get("RANK", "0") == "0":
            cursor = SHOW_CURSOR if sys.stderr.isatty() else ""
            # On a line of its own, beside any progress bar, and past Python's buffer, which the main thread may hold.
            os.write(2, f"\n{cursor}{_standing()}\n".encode())
    finally:
        os._exit(INTERRUPTED_EXIT)


_actions: list[Callable[[], None]] = [end, lambda: os._exit(INTERRUPTED_EXIT)]
"""Each SIGINT calls the next of these; the last one repeats."""
