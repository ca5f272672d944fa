"""Runs the two processes of a PPO run, and the peer's single process, as children, and records their peak memory."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
ACTOR_PYTHON = ROOT / ".venv-actor" / "bin" / "python"
SERVER_PYTHON = ROOT / ".venv-server" / "bin" / "python"
PEER_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
PEER_GRPO_PYTHON = ROOT / ".venv-trl-grpo" / "bin" / "python"
SAMPLE_PERIOD_S = 0.25
READY_TIMEOUT_S = 300.0


class Child:
    """A child process in its own process group; records the peak memory of its process tree."""

    def __init__(self, command: Sequence[object], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self.peak_rss_bytes = 0
        self.own_peak_rss_bytes = 0
        """Peak memory of the child alone, as counted by the kernel (VmHWM)."""
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(word) for word in command],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._tree = psutil.Process(self._process.pid)

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def sample(self) -> None:
        """Record the memory in use: RSS of the child and all its descendants."""
        resident = 0
        for process in [self._tree, *self._tree.children(recursive=True)]:
            try:
                resident += process.memory_info().rss
            except psutil.NoSuchProcess:  # it ended since it was listed
                continue
        self.peak_rss_bytes = max(self.peak_rss_bytes, resident)
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):  # an ended process has none
                self.own_peak_rss_bytes = int(line.split()[1]) * 1024

    def fail(self, what: str) -> "ChildFailed":
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
        return ChildFailed(f"{what}; the last lines of {self.log}:\n{tail}")

    def stop(self) -> None:
        """SIGTERM, half a minute of patience, then SIGKILL to the whole group."""
        if self.exit_code is None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


class ChildFailed(RuntimeError):
    """A child ended without a result."""


def wait(child: Child, *others: Child) -> None:
    """Wait until ``child`` has ended with 0, and sample the memory of all children meanwhile.

    Raises:
        ChildFailed: ``child`` failed, or one of the others, which should outlive it, ended.
    """
    while child.exit_code is None:
        for each in (child, *others):
            each.sample()
        for other in others:
            if other.exit_code is not None:
                child.stop()
                raise other.fail(f"a process ended with code {other.exit_code} that should serve on")
        time.sleep(SAMPLE_PERIOD_S)
    if child.exit_code:
        raise child.fail(f"exit code {child.exit_code}")


@contextmanager
def critic_server(directory: Path, overrides: Sequence[str]) -> Iterator[tuple[Child, int]]:
    """A running critic server and its port."""
    ready = directory / "ready.json"
    ready.unlink(missing_ok=True)
    where = (f"run.output_dir={directory}", "server.port=0", f"server.ready_file={ready}")
    server = Child([SERVER_PYTHON, "servers/serve_ppo_critic.py", *where, *overrides], directory / "server.log")
    try:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not ready.exists():
            if server.exit_code is not None or time.monotonic() > deadline:
                raise server.fail("the critic server did not start")
            time.sleep(SAMPLE_PERIOD_S)
        yield server, int(json.loads(ready.read_text())["port"])
    finally:
        server.stop()


def run_actor(
    directory: Path, overrides: Sequence[str], server: tuple[Child, int] | None = None
) -> tuple[Child, list[dict[str, Any]]]:
    """Train to the end, with the critic server at a port if given; returns the child and its metrics.jsonl."""
    where = [f"run.output_dir={directory}", *([f"remote_critic_rm.port={server[1]}"] if server else [])]
    actor = Child([ACTOR_PYTHON, "trainers/train_ppo_actor.py", *where, *overrides], directory / "actor.log")
    try:
        wait(actor, *([server[0]] if server else []))
    finally:
        actor.stop()
    return actor, [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def run_json(command: Sequence[object], log: Path) -> dict[str, Any]:
    """Run a script whose last line of output is a JSON object, and return that object."""
    child = Child(command, log)
    try:
        wait(child)
    finally:
        child.stop()
    return dict(json.loads(log.read_text().splitlines()[-1]))
