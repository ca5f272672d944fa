"""Starts programs as child processes, and leaves none of them behind."""

import contextlib
import ctypes
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from nemo_style_rlhf.launch.program import Program

STOP_GRACE_S = 30.0
"""Default seconds from SIGTERM to SIGKILL. torchrun gives its ranks as many."""
READY_TIMEOUT_S = 120.0
POLL_S = 0.1
LOG_TAIL_LINES = 15
ORPHAN_GRACE_S = 10.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class ProgramFailed(Exception):
    """A program ended with an error. The message is one sentence that names it, and the end of its log."""


class Child:
    """A started program. It leads a process group (and session) of its own; its output is appended to ``log``, or ``shown`` where
    this process writes.

    Linux sends it SIGTERM if this process ends without having stopped it. A program that ignores SIGTERM therefore outlives a
    killed launcher.
    """

    def __init__(self, program: Program, log: Path, *, shown: bool = False) -> None:
        self.program, self.log, self._shown = program, log, shown
        log.parent.mkdir(parents=True, exist_ok=True)
        if program.ready_file is not None:
            program.ready_file.unlink(missing_ok=True)
        self._began = log.stat().st_size if log.exists() else 0
        self._process = _starter().submit(self._start).result()

    def _start(self) -> Any:
        """The process; subclasses may start it in another way, as long as it offers the methods of ``subprocess.Popen``."""
        with contextlib.nullcontext() if self._shown else self.log.open("ab") as output:
            return subprocess.Popen(
                self.program.command,
                cwd=self.program.folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if self._shown else subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=functools.partial(_end_with, os.getpid()),
            )

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self.program.env}

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def poll(self) -> int | None:
        """The exit code, or None while the program runs."""
        code: int | None = self._process.poll()
        return code

    def wait(self, timeout_s: float) -> int:
        """The exit code.

        Raises:
            subprocess.TimeoutExpired: the program still runs after ``timeout_s`` seconds.
        """
        return int(self._process.wait(timeout_s))

    def signal(self, number: int) -> None:
        """Send a signal to the program alone, unless it has ended."""
        self._process.send_signal(number)

    def interrupt(self) -> None:
        """Send SIGINT to the program, or to its ranks: torchrun, which would pass it on, fails with a traceback of its own."""
        if self.program.ranks == 1:
            self.signal(signal.SIGINT)
        elif self.poll() is None:
            import psutil  # not at the top: programs that only start others load no library

            ranks = psutil.Process(self.pid).children()
            for rank in ranks:
                rank.send_signal(signal.SIGINT)
            if not ranks:  # torchrun itself is still loading
                self.signal(signal.SIGTERM)

    def kill(self) -> int:
        """Send SIGKILL to what is left of the whole group; returns the program's exit code."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return int(self._process.wait())

    def stop(self, grace_s: float = STOP_GRACE_S) -> int:
        """Send SIGTERM, wait up to ``grace_s`` seconds, and kill what is left of the group; returns the exit code."""
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
    def end(self) -> str:
        """How this program ended, as the rest of a sentence about it."""
        code = self.poll() or 0
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def failed(self, how: str = "") -> ProgramFailed:
        """The error that says ``how`` this program failed (default: by ending), with the end of its log."""
        if self._shown:
            return ProgramFailed(f"{self.program.name} {how or self.end}, see above")
        tail = "\n".join(self.output().splitlines()[-LOG_TAIL_LINES:])
        return ProgramFailed(f"{self.program.name} {how or self.end}; the end of its log {self.log}:\n{tail}")


@functools.cache
def _starter() -> ThreadPoolExecutor:
    """A thread that starts children and lives as long as this process: with the thread that started it, a child would end."""
    return ThreadPoolExecutor(1, "starts-children")


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


class LocalLauncher:
    """Programs of this machine, by name, with their output in ``log_dir/<name>.log``; leaving the context ends all of them."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._children: dict[str, Child] = {}

    def __enter__(self) -> "LocalLauncher":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in reversed(list(self._children)):
            self.stop(name, STOP_GRACE_S if kind is None else STOP_GRACE_S / 6)

    def __getitem__(self, name: str) -> Child:
        return self._children[name]

    def start(self, *programs: Program, shown: bool = False) -> None:
        """Start the programs in the background, each with an empty log, or ``shown``."""
        for program in programs:
            assert program.name not in self._children, f"{program.name} was already started"
            log = self._log_dir / f"{program.name}.log"
            log.unlink(missing_ok=True)
            self._children[program.name] = Child(program, log, shown=shown)

    def restart(self, name: str) -> None:
        """Stop what is left of the program, and start the same command again; its log goes on."""
        child = self._children[name]
        child.stop()
        self._children[name] = Child(child.program, child.log)

    def wait(self, name: str) -> None:
        """Wait until the program has ended with 0.

        Raises:
            ProgramFailed: it, or any other program of this launcher, has ended with an error.
        """
        child = self._children[name]
        wait_for(child, *(other for other in self._children.values() if other is not child))
        self.stop(name)  # children that it left

    def stop(self, name: str, grace_s: float = STOP_GRACE_S) -> int:
        """Stop the program, as :meth:`Child.stop`, and forget it; returns the exit code."""
        return self._children.pop(name).stop(grace_s)

    def stop_all(self, grace_s: float) -> None:
        """Stop the programs, all at the same time."""
        for child in self._children.values():
            child.signal(signal.SIGTERM)
        for name in list(self._children):
            self.stop(name, grace_s)


def _end_with(parent: int) -> None:
    """Runs in the child before the program: have it end with ``parent``, which may be gone already.

    SIGINT reaches it from its launcher alone, so it must not ignore it as jobs in a shell's background do.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)


def adopt_orphans() -> None:
    """Make this process the parent of all descendants whose own parent dies, so that :func:`end_orphans` finds them (Linux)."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_orphans(spared: Collection[int], mark: tuple[str, str] | None = None) -> None:
    """Wait until adopted processes have ended, which most do by themselves, and kill them if they do not.

    Args:
        spared: process ids of children that are no orphans.
        mark: a variable and its value; without it in their environment, orphans are spared, too.
    """
    import psutil

    def is_meant(process: psutil.Process) -> bool:
        if process.pid in spared:
            return False
        try:
            return mark is None or process.environ().get(mark[0]) == mark[1]
        except psutil.ZombieProcess:  # wait_procs takes its exit code
            return True
        except psutil.Error:
            return False

    deadline = time.monotonic() + ORPHAN_GRACE_S
    while orphans := list(filter(is_meant, psutil.Process().children())):
        for orphan in orphans if time.monotonic() > deadline else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                orphan.kill()
        psutil.wait_procs(orphans, timeout=2 * POLL_S)
