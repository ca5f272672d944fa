"""Scripts in processes of their own, forked from one that has imported the libraries they need: seconds less for each."""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from setproctitle import setproctitle

ROOT = Path(__file__).resolve().parents[2]

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["tests.integration.preloaded", "tests.integration.warm"])


class Forked:
    """As ``subprocess.Popen(command, cwd=ROOT, start_new_session=True)`` of a script and its arguments, its output in files."""

    def __init__(
        self, command: Sequence[str], stdout: Path, stderr: Path, environment: Mapping[str, str] = os.environ
    ) -> None:
        self._command = list(command)
        listener, speaker = _server.Pipe(duplex=False)
        self._process = _server.Process(
            target=_run_script, args=(self._command, stdout, stderr, dict(environment), speaker)
        )
        self._process.start()
        listener.recv()  # from here on it has a session of its own

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._command, timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def run(
    command: Sequence[str], *, timeout: float, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """A script and its arguments, as ``subprocess.run(..., cwd=ROOT, capture_output=True, text=True)`` would."""
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder) / "stdout", Path(folder) / "stderr"
        process = Forked(command, stdout, stderr, environment)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(list(command), timeout, stdout.read_text(), stderr.read_text()) from None
        return subprocess.CompletedProcess(list(command), code, stdout.read_text(), stderr.read_text())


def _run_script(command: list[str], stdout: Path, stderr: Path, environment: dict[str, str], started: object) -> None:
    os.setsid()
    for path, stream in ((stdout, sys.stdout), (stderr, sys.stderr)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ |= environment
    setproctitle(" ".join([sys.executable, *command]))  # for whoever looks for orphans
    sys.argv = command
    sys.path[0] = str(ROOT / Path(command[0]).parent)  # as python sets it for a script
    started.send(None)  # type: ignore[attr-defined]
    os._exit(_as_main(command[0]))


def _as_main(script: str) -> int:
    """The exit code; with everything that Python does at the end of a program, but multiprocessing not at that of a child."""
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 the program ends of it
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code
