"""Starts a program and leaves none of its processes behind, however this process ends (Linux).

A supervisor between this process and the program (tree.py) kills all that the program has started:

    this process  --- link: the command, then numbers of signals --->  supervisor  --- fork, exec --->  program  ---> descendants
                  <-------------- the program's process id ----------

The link is a pair of sockets. Its end tells the supervisor that this process has gone, and this process that the supervisor has.
"""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

from nemo_style_rlhf.processes import tree

END_S = tree.KILL_S + tree.TIDY_S + 1.0
"""Seconds that a supervisor has to kill a whole tree before it is killed itself."""


class ChildProcess:
    """A running program, with the methods of ``subprocess.Popen`` that our code needs. It leads its own session.

    Once the program has ended, its descendants are killed. Only then does :meth:`poll` return its exit code. If this process ends
    or drops the object, the program gets SIGTERM and is killed ``grace_s`` seconds later. Safe to use from several threads.
    """

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | os.PathLike[str] | None = None,
        stdin: int | IO[bytes] = subprocess.DEVNULL, stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None, pass_fds: Sequence[int] = (), grace_s: float = 0.0, linger_s: float = 0.0,
        afterwards: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Start the program, and return once it runs.

        Args:
            env, cwd, stdin, stdout, stderr, pass_fds: as in ``subprocess.Popen``.
            grace_s: seconds between SIGTERM and SIGKILL once this process has gone.
            linger_s: seconds that descendants have to end by themselves once the program has ended.
            afterwards: a command to run when everything is killed, if this process has gone.

        Raises:
            OSError: the program cannot be started.
            ValueError: the command is empty, or a word of it holds a NUL.
        """
        words = [str(os.getpid()), str(grace_s), str(linger_s), str(len(afterwards)), *afterwards, *command]
        content = b"\0".join(map(os.fsencode, words))
        if not command or content.count(b"\0") != len(words) - 1:
            raise ValueError(f"{command!r} is not a command")
        self._parent = os.getpid()
        self._link, theirs = socket.socketpair()
        with theirs:
            supervisor = [sys.executable, "-I", "-S", tree.__file__, str(theirs.fileno())]
            self._supervisor = subprocess.Popen(
                [*supervisor, *([tree.TIDIES] if afterwards else [])], env=env, cwd=cwd, stdin=stdin, stdout=stdout,
                stderr=stderr, pass_fds=[theirs.fileno(), *pass_fds], start_new_session=True,
            )  # fmt: skip
        self.stdin, self.stdout, self.stderr = self._supervisor.stdin, self._supervisor.stdout, self._supervisor.stderr
        answer = b""
        with suppress(ConnectionError):  # the supervisor could not be started
            self._link.sendall(len(content).to_bytes(4, "big") + content)
            answer = self._link.recv(4)
        self.pid = int.from_bytes(answer, "big", signed=True)
        """The program's process id."""
        if self.pid <= 0:
            code = self._supervisor.wait()
            if not answer:
                raise ChildProcessError(f"the supervisor of {command[0]} ended with exit code {code}")
            raise OSError(-self.pid, os.strerror(-self.pid), command[0])

    def fileno(self) -> int:
        """A descriptor that becomes readable when everything has ended."""
        return self._link.fileno()

    @property
    def returncode(self) -> int | None:
        """The exit code that :meth:`poll` or :meth:`wait` found last."""
        return self._supervisor.returncode

    def poll(self) -> int | None:
        """The program's exit code, negative for the number of a signal; None while it or a descendant runs."""
        return self._supervisor.poll()

    def wait(self, timeout_s: float | None = None) -> int:
        """The exit code.

        Raises:
            subprocess.TimeoutExpired: the program still runs after ``timeout_s`` seconds.
        """
        return self._supervisor.wait(timeout_s)

    def communicate(self, given: bytes | None = None, timeout_s: float | None = None) -> tuple[bytes, bytes]:
        """Write ``given`` to standard input, and read the output to its end.

        Raises:
            subprocess.TimeoutExpired: see :meth:`wait`.
        """
        return self._supervisor.communicate(given, timeout_s)

    def send_signal(self, number: int) -> None:
        """Send a signal to the program. SIGKILL, or any once it has ended, kills all of its descendants, too. Does not wait."""
        with suppress(OSError):
            self._link.send(bytes([number]), socket.MSG_DONTWAIT)
        if number == signal.SIGKILL:
            self._supervisor.send_signal(signal.SIGCONT)  # the program may have stopped it

    def kill(self) -> int:
        """Kill the program and all of its descendants, and return the exit code."""
        self.send_signal(signal.SIGKILL)
        try:
            return self.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill_supervisor()
            return self.wait()

    def kill_supervisor(self) -> None:
        """Kill a supervisor that hangs, and what is left in the program's own session."""
        if self.poll() is None:
            with suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
            self._supervisor.kill()

    def __del__(self) -> None:
        if hasattr(self, "_link"):
            with suppress(OSError):
                if os.getpid() == self._parent:  # else a fork of this process that shares the link
                    self._link.shutdown(socket.SHUT_RDWR)
            self._link.close()


def end_with_parent() -> None:
    """Make this child process of multiprocessing end with its parent, since a killed parent cannot stop it."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
