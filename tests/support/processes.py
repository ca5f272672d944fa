"""Runs the real server and the real actor as child processes, with a proxy between them that can cut the connection."""

import contextlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import requests

from tests.support import warm
from tests.support.paths import ACTOR_PYTHON, ROOT, SERVER_PYTHON

READY_TIMEOUT_S = 120


class Process:
    """A child in its own process group, with its output in a file."""

    def __init__(
        self, command: list[str], log: Path, *, warm_python: Path | None = None, ranks: int = 1,
        environment: Mapping[str, str] = os.environ,
    ) -> None:  # fmt: skip
        """With ``warm_python``, the command is a script for that Python, which has already loaded its libraries."""
        self.log = log
        self._child: subprocess.Popen[bytes] | warm.Forked
        if warm_python is not None:
            self._child = warm.Forked(command, log, log, python=warm_python, ranks=ranks, environment=environment)
            return
        with log.open("ab") as output:
            self._child = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environment
            )

    @property
    def pid(self) -> int:
        return self._child.pid

    def kill(self) -> None:
        """Send SIGKILL to the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def signal(self, number: int) -> None:
        """Send a signal to the child alone."""
        self._child.send_signal(number)

    def terminate(self) -> int:
        self._child.terminate()
        return self.wait(60)

    def poll(self) -> int | None:
        return self._child.poll()

    def wait(self, timeout: float) -> int:
        return self._child.wait(timeout)

    def output(self) -> str:
        return self.log.read_text(errors="replace")


def start_server(
    directory: Path, *overrides: str, ranks: int = 1, cold: Sequence[str] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> tuple[Process, int]:  # fmt: skip
    """Start `servers/serve_ppo_critic.py` on a free port; returns when it answers. ``cold``, even if [], is put before the
    command of a process without preloaded libraries."""
    ready = directory / "ready.json"
    ready.unlink(missing_ok=True)
    where = [f"run.output_dir={directory}", "server.port=0", f"server.ready_file={ready}"]
    command = ["servers/serve_ppo_critic.py", *where, *overrides]
    if cold is not None:
        process = Process([*cold, str(SERVER_PYTHON), *command], directory / "server.log", environment=environment)
    else:
        process = Process(command, directory / "server.log", warm_python=SERVER_PYTHON, ranks=ranks)
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not ready.exists():
        assert process.poll() is None, process.output()
        assert time.monotonic() < deadline, process.output()
        time.sleep(0.1)
    return process, int(json.loads(ready.read_text())["port"])


def wait_for_output(process: Process, text: str, *, after: int = 0) -> None:
    """Wait until ``text`` occurs in the output after its first ``after`` characters."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while text not in process.output()[after:]:
        assert process.poll() is None and time.monotonic() < deadline, process.output()
        time.sleep(0.05)


def run_pair(directory: Path, server_overrides: list[str], actor_overrides: list[str]) -> None:
    """Run server and actor below ``directory``, from start to end."""
    (directory / "critic").mkdir(exist_ok=True)
    server, port = start_server(directory / "critic", *server_overrides)
    actor = start_actor(directory / "actor", port, *actor_overrides)
    try:
        assert actor.wait(240) == 0, actor.output()
    finally:
        actor.kill()
        assert server.terminate() == 0


def start_actor(
    directory: Path, port: int, *overrides: str, ranks: int = 1, environment: Mapping[str, str] = os.environ
) -> Process:
    directory.mkdir(parents=True, exist_ok=True)
    where = [f"run.output_dir={directory}", f"remote_critic_rm.port={port}"]
    command = ["trainers/train_ppo_actor.py", *where, *overrides]
    log = directory / "actor.log"
    return Process(command, log, warm_python=ACTOR_PYTHON, ranks=ranks, environment=environment)


Watcher = Callable[[str, str], None]
"""Called as watcher("request" or "response", endpoint) before the message is passed on."""


@contextlib.contextmanager
def proxy(target_port: Callable[[], int], watcher: Watcher) -> Iterator[int]:
    """An HTTP proxy on a free port that shows every message to ``watcher``; an error of the watcher breaks the connection."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            endpoint = self.path.split("/")[3]
            try:
                watcher("request", endpoint)
                url = f"http://127.0.0.1:{target_port()}{self.path}"
                answer = requests.post(url, data=body, headers=dict(self.headers), timeout=60)
                watcher("response", endpoint)
                self.send_response(answer.status_code)
                for name, value in answer.headers.items():
                    if name.lower() not in ("transfer-encoding", "connection"):
                        self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer.content)
            except (ConnectionError, requests.RequestException):
                self.close_connection = True

        def log_message(self, *args: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, *where: Any) -> None:
            if not isinstance(sys.exc_info()[1], ConnectionError):  # killed processes do not close their connections
                super().handle_error(*where)

    with Server(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()
