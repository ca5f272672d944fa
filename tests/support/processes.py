"""Runs the real server and the real actor as child processes, with a proxy between them that can cut the connection."""

import contextlib
import http.server
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import requests

from nemo_style_rlhf.launch.local import Child
from nemo_style_rlhf.launch.program import Program, server, trainer
from tests.support import warm

READY_TIMEOUT_S = 120


class Process(Child):
    """A child in its own process group, with its output in a file."""

    def __init__(self, program: Program, log: Path, *, cold: Sequence[str] | None = None) -> None:
        """Fork a process that has already loaded its libraries. ``cold``, even if [], is put before the command of a new one."""
        self._cold = cold is not None
        super().__init__(replace(program, argv=[*(cold or []), *program.argv]), log)

    def _start(self) -> Any:
        if self._cold:
            return super()._start()
        python, *command = self.program.argv
        environment = {**os.environ, **self.program.env}
        return warm.Forked(
            command, self.log, self.log, python=Path(python), ranks=self.program.ranks, environment=environment
        )

    def terminate(self) -> int:
        """Send SIGTERM, and return the exit code; children that outlive the process are left for tests to see."""
        self.signal(signal.SIGTERM)
        return self.wait(60)


def start_server(
    directory: Path, *overrides: str, ranks: int = 1, cold: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[Process, int]:  # fmt: skip
    """Start `servers/serve_ppo_critic.py` on a free port; returns when it answers."""
    program = server("serve_ppo_critic", directory, *overrides, ranks=ranks, env=environment)
    process = Process(program, directory / "server.log", cold=cold)
    return process, int(process.ready(READY_TIMEOUT_S)["port"])


def is_alive(pid: int) -> bool:
    """Whether the process runs, also if it is stopped; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def soon(condition: Callable[[], object], timeout_s: float = 20.0) -> bool:
    """Return whether ``condition`` holds before ``timeout_s`` seconds are over."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def suspend(processes: Sequence[psutil.Process]) -> None:
    """Stop processes; returns once each of their threads stands still, which one that writes to a disk does only afterwards."""
    for process in processes:
        process.suspend()
    for process in processes:
        while not all(_stands_still(thread) for thread in Path(f"/proc/{process.pid}/task").iterdir()):
            time.sleep(0.01)


def _stands_still(thread: Path) -> bool:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0] in "TZX"


def process_below(pid: int, text: str) -> psutil.Process:
    """The first descendant of a process whose command contains ``text``."""
    below = psutil.Process(pid).children(recursive=True)
    return next(each for each in below if text in " ".join(each.cmdline()))


def wait_for_output(process: Child, text: str, *, after: int = 0) -> None:
    """Wait until ``text`` occurs in the output after its first ``after`` characters."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while text not in process.output()[after:]:
        assert process.poll() is None and time.monotonic() < deadline, process.output()
        time.sleep(0.05)


def run_pair(
    directory: Path, server_overrides: list[str], actor_overrides: list[str], *, ranks: int = 1, server_ranks: int = 1,
    environment: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Run server and actor below ``directory``, from start to end; ``ranks`` and ``environment`` are the actor's."""
    critic, port = start_server(directory / "critic", *server_overrides, ranks=server_ranks)
    actor = start_actor(directory / "actor", port, *actor_overrides, ranks=ranks, environment=environment)
    try:
        assert actor.wait(240) == 0, actor.output()
    finally:
        actor.kill()
        assert critic.terminate() == 0


def start_actor(
    directory: Path, port: int, *overrides: str, ranks: int = 1, environment: Mapping[str, str] | None = None
) -> Process:
    where = f"remote_critic_rm.port={port}"
    return Process(
        trainer("train_ppo_actor", directory, where, *overrides, ranks=ranks, env=environment), directory / "actor.log"
    )


@contextlib.contextmanager
def held_to(share: float, pid: int) -> Iterator[None]:
    """Hold a process and its children to a share of the time, of which they get a part every second."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    ended = threading.Event()

    def signal_all(number: int) -> None:
        for each in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(number)

    def hold() -> None:
        while not ended.is_set():
            signal_all(signal.SIGSTOP)
            ended.wait(1 - share)
            signal_all(signal.SIGCONT)
            ended.wait(share)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


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


class Plug:
    """Kills both processes at the n-th message of a kind, once."""

    def __init__(self) -> None:
        self.processes: list = []
        self.pulled = False
        self._armed: tuple[str, str] | None = None
        self._remaining = 0

    def arm(self, direction: str, endpoint: str, count: int) -> None:
        self._armed, self._remaining, self.pulled = (direction, endpoint), count, False

    def __call__(self, direction: str, endpoint: str) -> None:
        if self._armed != (direction, endpoint):
            return
        self._remaining -= 1
        if self._remaining == 0:
            self._armed, self.pulled = None, True
            for process in self.processes:
                process.kill()
            raise ConnectionError
