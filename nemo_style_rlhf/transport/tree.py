"""Runs a program and leaves none of its processes behind: ``python tree.py DESCRIPTOR PROGRAM ARGUMENTS``.

Once the program has ended, this process gets SIGTERM, or the other end of the pipe DESCRIPTOR is closed, all processes that the
program has started are killed, whatever session or parent they have.

This file imports only the standard library, since it is run by its path.
"""

import ctypes
import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    """The program's exit code, or 1 if it was killed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    descriptor = int(sys.argv[1])
    try:
        if (program := os.fork()) == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.close(descriptor)
            os.execvp(sys.argv[2], sys.argv[2:])
        for each in (0, 1):  # the program's; whoever reads its output waits until all that hold it have ended
            os.close(each)
        ended = os.pidfd_open(program)
        ready, _, _ = select.select([ended, descriptor], [], [])
        return os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]) if ended in ready else 1
    finally:
        _kill_all()


def _kill_all() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        try:
            os.wait()  # children of one that has ended are this process's now
        except ChildProcessError:
            return


if __name__ == "__main__":
    sys.exit(main() & 0xFF)
