"""Run the stages of an example as the processes they are, and leave none behind."""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
ACTOR_PYTHON = str(ROOT / ".venv-actor" / "bin" / "python")
SERVER_PYTHON = str(ROOT / ".venv-server" / "bin" / "python")
STOP_GRACE_S = 30.0
POLL_S = 0.2
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch is imported: spinning threads starve each other
console = Console()
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class StageFailed(Exception):
    """A stage ended with an error; the message shows the end of its log."""


class Pipeline:
    """Processes whose output goes to ``log_dir/<name>.log``; leaving the context ends every one that still runs.

    Each process leads a group of its own, so that its children (Triton's server, data loaders) end with it, and Linux
    ends it should this process die without a chance to.
    """

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Pipeline":
        self.log_dir.mkdir(parents=True, exist_ok=True)
        signal.signal(signal.SIGTERM, _raise_interrupt)
        signal.signal(signal.SIGHUP, _raise_interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in reversed(list(self._running)):
            self.stop(name, grace_s=STOP_GRACE_S if kind is None else 5.0)

    def run(self, name: str, command: Sequence[str], *, watch: Callable[[], None] | None = None) -> float:
        """Run ``command`` to its end and return its seconds; ``watch`` is called meanwhile.

        Raises:
            StageFailed: it, or another process of this pipeline, ended with an error.
        """
        started = time.monotonic()
        process = self.start(name, command)
        while process.poll() is None:
            time.sleep(POLL_S)
            self.check()
            if watch is not None:
                watch()
        self.check()
        self._end(name)
        return time.monotonic() - started

    def start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start ``command`` in the background."""
        with self._log(name).open("wb") as log:
            process = subprocess.Popen(
                [str(part) for part in command],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        self._running[name] = process
        return process

    def wait_for_server(self, name: str, ready_file: Path, timeout_s: float = 120.0) -> dict[str, Any]:
        """What the server ``name`` wrote into its ready file (host, port, ...).

        Raises:
            StageFailed: it ended, or was not ready in time.
        """
        deadline = time.monotonic() + timeout_s
        while not ready_file.exists():
            self.check()
            if self._running[name].poll() is not None or time.monotonic() > deadline:
                raise StageFailed(f"{name} was not ready within {timeout_s:.0f} s:\n{self.tail(name)}")
            time.sleep(POLL_S)
        ready: dict[str, Any] = json.loads(ready_file.read_text())
        return ready

    def stop(self, name: str, grace_s: float = STOP_GRACE_S) -> None:
        """End ``name``: SIGTERM, and SIGKILL for what is left of its group after ``grace_s``."""
        process = self._running[name]
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        self._end(name)

    def check(self) -> None:
        """
        Raises:
            StageFailed: one of the processes has ended with an error.
        """
        for name, process in self._running.items():
            if process.poll() not in (None, 0):
                raise StageFailed(f"{name} ended with exit code {process.returncode}:\n{self.tail(name)}")

    def tail(self, name: str, lines: int = 15) -> str:
        """The last lines of a process's log and where the rest is."""
        log = self._log(name)
        return "\n".join([*log.read_text(errors="replace").splitlines()[-lines:], f"(whole log: {log})"])

    def _end(self, name: str) -> None:
        process = self._running.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its group outlives it where it left children
        process.wait()

    def _log(self, name: str) -> Path:
        return self.log_dir / f"{name}.log"


def run_example(example: Callable[[Pipeline], None], output_dir: Path) -> None:
    """``example`` in an empty ``output_dir``; a failed stage exits with 1 and its log's end, Ctrl-C with 130."""
    shutil.rmtree(output_dir, ignore_errors=True)
    try:
        with Pipeline(output_dir / "logs") as pipeline:
            example(pipeline)
    except StageFailed as error:
        console.print(f"[bold red]failed:[/] {error}", highlight=False)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        console.print("[bold]interrupted[/]: every process was stopped")
        raise SystemExit(130) from None


def say(text: str) -> None:
    console.print(text, highlight=False)


def overrides(settings: Mapping[str, Any]) -> list[str]:
    """Hydra overrides ``key=value``; None becomes null and booleans are written as YAML has them."""
    return [f"{key}={_value(value)}" for key, value in settings.items()]


def _value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _raise_interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _die_with_parent() -> None:
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
