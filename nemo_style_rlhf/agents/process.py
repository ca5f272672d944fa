"""The trainer's side of one episode worker's process."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import nemo_style_rlhf
from nemo_style_rlhf.agents.wire import MEMORY_BYTES, SharedState
from nemo_style_rlhf.agents.worker import DUMP, Setup
from nemo_style_rlhf.processes.child import END_S, ChildProcess
from nemo_style_rlhf.schema.agent import AgentConfig

_CHUNK = 2**20


class WorkerProcess:
    """A worker and all processes that it starts. Only ``close`` may block."""

    def __init__(self, config: AgentConfig) -> None:
        assert config.path is not None
        memory = os.memfd_create("episodes")
        os.truncate(memory, MEMORY_BYTES)
        self._socket, other = socket.socketpair()
        self._socket.setblocking(False)
        setup = Setup(
            config.path, config.class_name, config.episodes_per_worker, config.step_timeout_s, config.episode_timeout_s,
            [folder or os.getcwd() for folder in sys.path], other.fileno(), memory,
        )  # fmt: skip
        package = str(Path(nemo_style_rlhf.__file__).parent.parent)
        found = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        try:
            self._process = ChildProcess(
                [sys.executable, "-m", "nemo_style_rlhf.agents.worker", json.dumps(dataclasses.asdict(setup))],
                env={**os.environ, "PYTHONPATH": found, "PYTHONUNBUFFERED": "1"},
                stdout=2,  # what environments print must not mix with the output of the trainer's caller
                pass_fds=(other.fileno(), memory),
            )
            self.words = SharedState(memory)
        finally:
            os.close(memory)
            other.close()
        self.pid: int | None = None
        """The worker's process id, once it has reported it."""
        self.started = time.monotonic()
        self.stopping: float | None = None
        """``time.monotonic()`` of the order to end; None before."""
        self.ended = False
        self._gone: float | None = None
        self._incoming, self._outgoing = bytearray(), bytearray()
        self._searched = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_output(self) -> bool:
        """True while output waits for room in the socket."""
        return bool(self._outgoing)

    def send(self, line: bytes) -> None:
        self._outgoing += line
        self.flush()

    def flush(self) -> None:
        """Write as much as the socket takes."""
        with contextlib.suppress(BlockingIOError, ConnectionError):  # an ended worker is noticed by reading
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing)]

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived. Set ``ended`` when no process is left to send more."""
        try:
            arrived = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return []
        except ConnectionError:
            arrived = b""
        if not arrived:
            self.ended = True
        self._incoming += arrived
        end = self._incoming.rfind(b"\n", self._searched) + 1
        self._searched = 0 if end else len(self._incoming)
        lines = bytes(self._incoming[:end]).splitlines()
        del self._incoming[:end]
        self._searched = len(self._incoming)
        return [json.loads(line) for line in lines]

    def show(self) -> None:
        """Make the worker print its stack traces for the user."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, DUMP)

    def stop(self) -> None:
        """Kill the worker and all that it started. It has ended once ``receive`` sets ``ended``."""
        if self.stopping is None:
            self.stopping = time.monotonic()
            self._process.send_signal(signal.SIGKILL)

    @property
    def exit_code(self) -> int | None:
        """The exit code of a worker that has ended, negative for a signal's number."""
        return self._process.poll()

    def look(self) -> None:
        """Detect what the socket does not show: a supervisor that cannot end its worker, or a worker that is gone although some
        process still holds its end of the socket."""
        now = time.monotonic()
        if self.stopping is not None and now - self.stopping > END_S:
            self._process.kill_supervisor()
        if self._process.poll() is not None:
            self._gone = self._gone or now
            self.ended = self.ended or now - self._gone > END_S

    def close(self) -> None:
        """Kill what is left of the worker, usually nothing, and release it."""
        self._process.kill()
        self._socket.close()
