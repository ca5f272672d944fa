"""Starts tritonserver, and ends it and all it has started once the server process has gone, however that ends.

Its standard input is a pipe that the server process holds. It leads a session of its own, which tritonserver and its processes
inherit: what kills the server's process group does not reach it, and a process that hangs, or whose parents are killed at once,
cannot leave it.

    python -m nemo_style_rlhf.critic_service.guardian NAME PROGRAM ARGUMENTS    # NAME: belongings.py
"""

import select
import signal
import subprocess
import sys
from contextlib import suppress

from nemo_style_rlhf.critic_service import belongings, confine

PERIOD_S = 0.1
GRACE_S = 2.0
"""From SIGINT for tritonserver, which waits for running calls, to SIGKILL for all."""
NEWS_S = 1.0
"""A server process that ends together with tritonserver does so within this time; it sees the latter's end by itself."""


def main() -> int:
    """Run the program; its exit code, as a shell gives it."""
    name, *command = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM):  # a batch system's: the server process says when to end
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN not handed down to the program
    program = subprocess.Popen([sys.executable, confine.__file__, *command], stdin=subprocess.DEVNULL)
    while program.poll() is None and not _alone(PERIOD_S):
        pass
    if program.poll() is None:
        program.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            program.wait(GRACE_S)
    belongings.kill_session()
    if _alone(NEWS_S):  # else the log is still wanted
        belongings.remove(name)
    code = program.wait()
    return code if code >= 0 else 128 - code


def _alone(timeout_s: float) -> bool:
    """Whether the server process has gone, or wants an end, before ``timeout_s`` seconds are over."""
    return bool(select.select([sys.stdin], [], [], timeout_s)[0])


if __name__ == "__main__":
    sys.exit(main())
