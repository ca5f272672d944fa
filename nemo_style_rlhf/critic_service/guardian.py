"""Starts tritonserver, and kills it and all its children once the server process has gone, however that ended, or asks for it. No
client waits for an answer then, since the front door is closed first; ``belongings.py`` removes what they leave.

The guardian's standard input is a pipe that the server process holds. The guardian leads its own session, which tritonserver and
its children inherit: a signal to the server's process group does not reach them, and a process that hangs, or whose parents are
killed at once, cannot leave the session.

    python -m nemo_style_rlhf.critic_service.guardian NAME PROGRAM ARGUMENTS    # NAME: belongings.py
"""

import select
import signal
import subprocess
import sys

from nemo_style_rlhf.critic_service import belongings
from nemo_style_rlhf.transport import confine

PERIOD_S = 0.1
NEWS_S = 1.0
"""Seconds within which a server process that ends together with tritonserver has gone; otherwise it notices tritonserver's end
itself."""


def main() -> int:
    """Run the program, and return its exit code as a shell would."""
    name, *command = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM):  # from a batch system: the server process decides when to end
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN, the program does not inherit this
    program = subprocess.Popen([sys.executable, confine.__file__, *command], stdin=subprocess.DEVNULL)
    while program.poll() is None and not _alone(PERIOD_S):
        pass
    belongings.kill_session()
    if _alone(NEWS_S):  # else the server process still reads the log
        belongings.remove(name)
    code = program.wait()
    return code if code >= 0 else 128 - code


def _alone(timeout_s: float) -> bool:
    """Whether the server process goes, or asks to end, within ``timeout_s`` seconds."""
    return bool(select.select([sys.stdin], [], [], timeout_s)[0])


if __name__ == "__main__":
    sys.exit(main())
