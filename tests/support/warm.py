"""Runs scripts in separate processes that have already loaded their libraries, which saves seconds for each."""

import functools
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from nemo_style_rlhf.launch.environment import ENVIRONMENT
from tests.support.paths import ACTOR_PYTHON, ROOT, SERVER_PYTHON

SLOW_DISK_PATH = os.pathsep.join([str(ROOT / "tests/support/slow_disk"), os.environ.get("PYTHONPATH", "")])
LIBRARIES = {
    ACTOR_PYTHON: [
        "hydra", "pytorch_lightning", "vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker",
        "vllm.v1.attention.backends.cpu_attn", "vllm.model_executor.models.llama", "nemo_style_rlhf.generation.vllm",
        "nemo_style_rlhf.ppo.run", "nemo_style_rlhf.critic_service.process", "nemo_style_rlhf.critic_service.critic_server",
    ],
    SERVER_PYTHON: [
        "hydra", "nemo_style_rlhf.critic_service.process", "nemo_style_rlhf.critic_service.critic_server",
        "transformers.models.llama.modeling_llama",
    ],
}  # fmt: skip


class Forked:
    """Like a ``ChildProcess`` of a script and its arguments, in the repository's root and a new session."""

    def __init__(
        self, command: Sequence[str], stdout: Path, stderr: Path, *,
        python: Path = ACTOR_PYTHON, ranks: int = 1, environment: Mapping[str, str] = os.environ,
    ) -> None:  # fmt: skip
        """Starts several ``ranks`` as torchrun would."""
        self._command = list(command)
        self._folder = tempfile.TemporaryDirectory()
        self._exit_code = Path(self._folder.name) / "exit_code"
        request = {
            "command": self._command, "stdout": str(stdout), "stderr": str(stderr), "environment": dict(environment),
            "ranks": ranks, "exit_code": str(self._exit_code),
        }  # fmt: skip
        server = _fork_server(python)
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        self.pid = int(server.stdout.readline())

    def poll(self) -> int | None:
        return int(self._exit_code.read_text()) if self._exit_code.exists() else None

    def wait(self, timeout: float = float("inf")) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self._command, timeout)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> int:
        """Kill the whole group; returns the exit code."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return self.wait()


def run(
    command: Sequence[str], *, timeout: float, python: Path = ACTOR_PYTHON, ranks: int = 1,
    environment: Mapping[str, str] = os.environ,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a script and its arguments like ``subprocess.run(..., cwd=ROOT, capture_output=True, text=True)``."""
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder) / "stdout", Path(folder) / "stderr"
        process = Forked(command, stdout, stderr, python=python, ranks=ranks, environment=environment)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(list(command), timeout, stdout.read_text(), stderr.read_text()) from None
        return subprocess.CompletedProcess(list(command), code, stdout.read_text(), stderr.read_text())


@functools.cache
def _fork_server(python: Path) -> subprocess.Popen[str]:
    """The fork server of ``python``. It ends with this process, which holds its input open."""
    return subprocess.Popen(
        [str(python), "-m", "tests.support.fork_server", *LIBRARIES[python]],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "DS_ACCELERATOR": "cpu", "PYTHONPATH": SLOW_DISK_PATH},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
