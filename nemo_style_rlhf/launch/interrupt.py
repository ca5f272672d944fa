"""Ends the process at once after Ctrl-C, with one sentence about its progress.

SIGINT is blocked in every thread, and thus in every child process, which a terminal would interrupt as well; one thread waits for
it. A main thread deep in a kernel or a collective cannot delay the end, and no library can swallow the signal.
"""

import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

INTERRUPTED_EXIT = 130
"""Exit code of a process ended by Ctrl-C: 128 + SIGINT, as in shells."""
SHOW_CURSOR = "\x1b[?25h"
"""Terminal code that shows the cursor, if a progress bar has hidden it."""

_listener: threading.Thread | None = None
_folders: list[Path] = []
_standing: Callable[[], str] = lambda: "stopped; the same command starts again"  # noqa: E731


def listen() -> None:
    """From now on, SIGINT ends the process with ``INTERRUPTED_EXIT`` and the sentence of :func:`describe`, unless the process was
    started with SIGINT ignored, as background jobs are."""
    global _listener
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        _listener = threading.Thread(target=_wait, name="ctrl-c", daemon=True)
        _listener.start()


def keep_from_children() -> None:
    """Start multiprocessing's tracker of semaphores now: its start unblocks SIGINT, which is then blocked again."""
    if _listener is not None:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def describe(standing: Callable[[], str]) -> None:
    """Set the function that returns the sentence. It is called in another thread, and must only read."""
    global _standing
    _standing = standing


def remove_at_end(folder: Path) -> None:
    """Make :func:`end`, SIGTERM and SIGHUP remove a folder in memory: no other process would. Called in the main thread.

    These two are not blocked, as children would inherit that. A thread learns of them by Python's wake-up descriptor, whatever
    the main thread does."""
    if not _folders:
        heard, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _leave_to_thread)
        os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_forget)
        threading.Thread(target=_end_when_told, args=(heard,), name="ended", daemon=True).start()
    _folders.append(folder)


_held: list[set[int | signal.Signals]] = []
"""Signals that were blocked before each fork that is under way."""


def _hold() -> None:
    _held.append(signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP}))


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _held.pop())


def _forget() -> None:
    """Restore the default handlers in a forked child: its signals would reach its parent's thread."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is _leave_to_thread:
            signal.signal(number, signal.SIG_DFL)
    _release()


def _leave_to_thread(number: int, frame: object) -> None:
    """Do nothing, unlike the default handler."""


def _end_when_told(heard: int) -> None:
    while True:
        (number,) = os.read(heard, 1)
        if signal.getsignal(number) is _leave_to_thread:
            _remove_folders()
            os._exit(128 + number)


def _remove_folders() -> None:
    for folder in _folders:
        shutil.rmtree(folder, ignore_errors=True)


def weights_in_memory(run_id: str) -> Path:
    """Folder of a run's published weights. A process that kills the run's processes removes it."""
    return Path(f"/dev/shm/nsr-{run_id}-weights")


def on_first(action: Callable[[], None]) -> None:
    """Make the first SIGINT only call ``action``, in another thread; the second one ends the process."""
    _actions.insert(0, action)


def as_exception() -> None:
    """Make the first SIGINT raise KeyboardInterrupt in the main thread, for work to be undone; the second ends the process.

    SIGUSR2 interrupts the main thread: Python's ``interrupt_main`` would wait until it stops waiting by itself.
    """
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.signal(signal.SIGUSR2, signal.default_int_handler)
    on_first(lambda: signal.pthread_kill(main_thread, signal.SIGUSR2))


def hand_over() -> None:
    """Unblock SIGINT for the caller's own handler."""
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
        threading.Thread(target=action, daemon=True).start()  # not in this thread: it must wait for a second SIGINT


def end() -> None:
    """End the process as SIGINT does, with those that multiprocessing started for it and their descendants: they block SIGINT."""
    import psutil  # not at the top: this file is imported before the Python interpreter is checked

    try:
        stderr = os.dup(2)
        # Silences the other threads, and a child that they start from now on: it would complain that its parent is gone.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        listed = {child.pid for child in multiprocessing.active_children()}  # lacks one that is being started
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                if child.pid in listed or "--multiprocessing-fork" in child.cmdline():
                    for process in [*child.children(recursive=True), child]:
                        process.kill()
        _remove_folders()
        if os.environ.get("RANK", "0") == "0":
            cursor = SHOW_CURSOR if os.isatty(stderr) else ""
            # On a separate line after any progress bar, and not through Python's buffer: the main thread may have locked it.
            os.write(stderr, f"\n{cursor}{_standing()}\n".encode())
    finally:
        os._exit(INTERRUPTED_EXIT)


_actions: list[Callable[[], None]] = [end, lambda: os._exit(INTERRUPTED_EXIT)]
"""Each SIGINT calls the next of these actions; the last one repeats."""
