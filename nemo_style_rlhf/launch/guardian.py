"""A guardian for processes that run a user's code: neither they nor what they start outlive the process that wants them (Linux).

A process group is not enough for that, since users' programs found groups of their own. It imports no torch.
"""

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_AWAITED = {signal.SIGCHLD, signal.SIGTERM}


def guarded(parent: int, tell: Callable[[int], None]) -> None:
    """Split the calling process, which must have one thread, in two. The new one returns, and goes on as the leader of a session.
    The other, its guardian, never returns: it kills the new one and all of its descendants, and ends, as soon as the new one has
    ended, the thread that started the guardian has ended, or the guardian has been sent SIGTERM.

    Args:
        parent: process id of the process that started the caller.
        tell: called in the guardian with the exit code of a new process that ended by itself, negative for a signal's number.
    """
    libc = ctypes.CDLL(None)
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
    guardian = os.getpid()
    child = os.fork()
    if child:
        if (code := _awaited(child)) is not None:
            tell(code)
        _end_descendants()
        os._exit(0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guardian:
        os._exit(1)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)


def _awaited(child: int) -> int | None:
    """The exit code of ``child``; or None once this process is to end."""
    while signal.sigwait(_AWAITED) == signal.SIGCHLD:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                return os.waitstatus_to_exitcode(ended[1])
    return None


def _end_descendants() -> None:
    """Kill and await all children. Those of a killed one become ours, and are killed in turn."""
    with contextlib.suppress(ChildProcessError):  # there are no more
        while True:
            for number in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            os.waitpid(-1, 0)


def _children() -> list[int]:
    """Process ids of this process's children."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                status = (folder / "stat").read_text()
            except OSError:  # it has ended
                continue
            if int(status.rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(folder.name))
    return found
