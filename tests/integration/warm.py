"""Scripts in processes of their own, forked from one that has imported the libraries they need: seconds less for each."""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.integration.processes import ROOT

LIBRARIES = ["torch", "transformers", "pytorch_lightning", "hydra", "tests.integration.warm"]

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(LIBRARIES)


def run(command: Sequence[str], *, timeout: float) -> subprocess.CompletedProcess[str]:
    """A script and its arguments, as ``subprocess.run(..., cwd=ROOT, capture_output=True, text=True)`` would."""
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder) / "stdout", Path(folder) / "stderr"
        process = _server.Process(target=_run_script, args=(list(command), stdout, stderr))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(list(command), timeout, stdout.read_text(), stderr.read_text())
        return subprocess.CompletedProcess(list(command), process.exitcode, stdout.read_text(), stderr.read_text())


def _run_script(command: list[str], stdout: Path, stderr: Path) -> None:
    os.setsid()
    for path, stream in ((stdout, sys.stdout), (stderr, sys.stderr)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
    os.chdir(ROOT)
    sys.argv = command
    sys.path[0] = str(ROOT / Path(command[0]).parent)  # as python sets it for a script
    runpy.run_path(command[0], run_name="__main__")
