"""Starts programs as child processes, and leaves none of them behind."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemo_style_rlhf.errors import USER_ERROR_EXIT
from nemo_style_rlhf.launch.program import Program
from nemo_style_rlhf.processes.child import ChildProcess

STOP_GRACE_S = 30.0
"""Default seconds from SIGTERM to SIGKILL. torchrun gives its ranks as many."""
READY_TIMEOUT_S = 120.0
POLL_S = 0.1
LOG_TAIL_LINES = 15
ERROR = "error: "
"""Begins the sentence about a user's mistake."""
LINGER_S = 5.0
"""Seconds in which processes left by a program may end by themselves, as most do."""


class ProgramFailed(Exception):
    """A program ended with an error. The message is one sentence that names it, and the end of its log."""


class Child:
    """A started program, whose output is appended to ``log``, or ``shown`` where this process writes.

    If this process ends without having stopped it, it gets SIGTERM, and ``grace_s`` seconds later it is killed.
    """

    def __init__(self, program: Program, log: Path, *, shown: bool = False, grace_s: float = STOP_GRACE_S) -> None:
        self._grace_s = grace_s
        self.program, self.log, self._shown = program, log, shown
        log.parent.mkdir(parents=True, exist_ok=True)
        if program.ready_file is not None:
            program.ready_file.unlink(missing_ok=True)
        self._began = log.stat().st_size if log.exists() else 0
        self._process = self._start()

    def _start(self) -> Any:
        """The process; subclasses may start it in another way, as long as it offers the methods of :class:`ChildProcess`."""
        with contextlib.nullcontext() if self._shown else self.log.open("ab") as output:
            return ChildProcess(
                self.program.command, cwd=self.program.folder, env=self._environment(), stdout=output,
                stderr=None if self._shown else subprocess.STDOUT, grace_s=self._grace_s, linger_s=LINGER_S,
            )  # fmt: skip

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self.program.env}

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def poll(self) -> int | None:
        """The exit code, or None while the program or something that it started runs."""
        code: int | None = self._process.poll()
        return code

    def wait(self, timeout_s: float) -> int:
        """The exit code.

        Raises:
            subprocess.TimeoutExpired: the program still runs after ``timeout_s`` seconds.
        """
        return int(self._process.wait(timeout_s))

    def signal(self, number: int) -> None:
        """Send a signal only to the program, unless it has ended."""
        self._process.send_signal(number)

    def interrupt(self) -> None:
        """Send SIGINT to the program, or to its ranks: torchrun would pass it on, but fails with a traceback of its own."""
        if self.program.ranks == 1:
            self.signal(signal.SIGINT)
        elif self.poll() is None:
            import psutil  # not at the top: programs that only start others load no library

            with contextlib.suppress(psutil.NoSuchProcess):  # torchrun has ended, not yet all that it has left
                ranks = psutil.Process(self.pid).children()
                for rank in ranks:
                    rank.send_signal(signal.SIGINT)
                if not ranks:  # torchrun itself is still loading
                    self.signal(signal.SIGTERM)

    def kill(self) -> int:
        """Kill the program and all that it started; returns its exit code."""
        return int(self._process.kill())

    def stop(self, grace_s: float = STOP_GRACE_S) -> int:
        """Send SIGTERM, wait up to ``grace_s`` seconds, and kill what is left; returns the exit code."""
        self.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(grace_s)
        return self.kill()

    def ready(self, timeout_s: float = READY_TIMEOUT_S) -> dict[str, Any]:
        """Wait for a server, and return what it wrote into its ready file (host, port, ...).

        Raises:
            ProgramFailed: the server ended, or was not ready in time.
        """
        assert self.program.ready_file is not None
        deadline = time.monotonic() + timeout_s
        while not self.program.ready_file.exists():
            if self.poll() is not None:
                raise self.failed()
            if time.monotonic() > deadline:
                raise self.failed(f"was not ready within {timeout_s:.0f} s")
            time.sleep(POLL_S)
        ready: dict[str, Any] = json.loads(self.program.ready_file.read_text())
        return ready

    def output(self) -> str:
        """The whole log, which may begin with the output of earlier programs."""
        return self.log.read_text(errors="replace")

    def said(self, text: str) -> str | None:
        """The last line with ``text`` that this program has written."""
        lines = self.log.read_bytes()[self._began :].decode(errors="replace").splitlines()
        return next((line for line in reversed(lines) if text in line), None)

    @property
    def mistake(self) -> str | None:
        """The sentence about a user's mistake by which this program ended; None if it runs, or ended otherwise."""
        code = self.poll()
        if not code or (code != USER_ERROR_EXIT and self.program.ranks == 1):  # torchrun has an exit code of its own
            return None
        said = self.said(ERROR)
        return None if said is None else said.removeprefix(ERROR)

    @property
    def end(self) -> str:
        """Says how this program ended, as the rest of a sentence about it."""
        code = self.poll() or 0
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def failed(self, how: str = "") -> ProgramFailed:
        """The error that says ``how`` this program failed (default: by ending), with the end of its log."""
        if self._shown:
            return ProgramFailed(f"{self.program.name} {how or self.end}, see above")
        tail = "\n".join(self.output().splitlines()[-LOG_TAIL_LINES:])
        return ProgramFailed(f"{self.program.name} {how or self.end}; the end of its log {self.log}:\n{tail}")


def wait_for(child: Child, *others: Child, watch: Callable[[], None] = lambda: None) -> None:
    """Wait until ``child`` has ended with 0, and call ``watch`` several times a second meanwhile.

    Raises:
        ProgramFailed: ``child`` or one of the ``others`` has ended with an error.
    """
    running = True
    while running:
        time.sleep(POLL_S)
        running = child.poll() is None
        for each in (*others, child):  # a server's failure explains its client's
            if each.poll():
                raise each.failed()
        watch()
