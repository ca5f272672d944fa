"""Tells which tests the Python code of a response passes. The code cannot reach the process that judges.

Code and tests run in two interpreters, each in a sandbox of its own (scoring/sandbox.py), joined by one socket
(scoring/code_peers.py). The tests' interpreter calls the code's functions across it and gets plain data back; it compares them
with what it expects, and only it gives the verdict. So the code cannot patch a comparison or an ``assert``, cannot write a
verdict, and never sees the tests: it gets the arguments of calls, but no expected value.

That does not make a test better than it is. Any true value passes `assert f(3)`; the code decides a test that compares two
objects of the code's classes or that calls one of its functions to judge; and arguments may give the answer away. Some tests of
honest code pass in one interpreter but fail here: those with arithmetic between an object of the code's class and a value of the
test, with an object of a test's class as an argument, with a class derived from one of the code's, or that look for files or
printed text themselves.
"""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_style_rlhf.scoring.sandbox import SandboxLimits, confined

PEERS = str(Path(__file__).with_name("code_peers.py"))


def passed_tests(
    code: str, tests: Sequence[str], *, wall_s: float = 8.0, limits: SandboxLimits | None = None
) -> set[int]:
    """Indices of the ``tests`` (Python text) that finish without an exception. They run one after another on the same import of
    ``code``; if time runs out, the tests that have passed by then count.

    Args:
        wall_s: seconds for everything together.
        limits: limits of each of the two processes.

    Raises:
        UserError: this machine cannot run a sandbox, see :func:`sandbox.require_sandbox`.
    """
    limits = limits or SandboxLimits()
    python = [sys.executable, "-I", "-B", PEERS]
    for_code, for_tests = socket.socketpair()
    with for_code, for_tests:
        code_fd, tests_fd = for_code.fileno(), for_tests.fileno()
        with (
            confined([*python, "code", str(code_fd)], limits, pass_fds=[code_fd], readable=[PEERS]),
            confined(
                [*python, "tests", str(tests_fd)],
                limits,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[tests_fd],
                readable=[PEERS],
            ) as judge,
        ):
            for_code.close()  # each end sees that the other has gone
            for_tests.close()
            try:
                verdicts, _ = judge.communicate(json.dumps({"code": code, "tests": list(tests)}).encode(), wall_s)
            except subprocess.TimeoutExpired:
                judge.send_signal(signal.SIGKILL)
                verdicts, _ = judge.communicate()
    return {int(line) for line in verdicts.split()}
