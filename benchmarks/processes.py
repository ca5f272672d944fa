"""Runs the two processes of a PPO run, and the peer's single process, as children, and records their peak memory."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from nemo_style_rlhf.launch import local
from nemo_style_rlhf.launch.interpreter import ROOT
from nemo_style_rlhf.launch.program import Program, server, trainer

PEER_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
PEER_GRPO_PYTHON = ROOT / ".venv-trl-grpo" / "bin" / "python"
READY_TIMEOUT_S = 300.0
LIST_S = 2.0
"""Seconds between two searches for descendants, which read the state of every process of the machine."""


class Child(local.Child):
    """A child process that records the peak memory of its process tree."""

    peak_rss_bytes = 0
    own_peak_rss_bytes = 0
    """Peak memory of the child alone, as counted by the kernel (VmHWM)."""

    _listed = -LIST_S
    _tree: Sequence[psutil.Process] = ()

    def sample(self) -> None:
        """Record the memory in use: RSS of the child and all its descendants."""
        with suppress(psutil.NoSuchProcess, FileNotFoundError):  # the child has ended
            if time.monotonic() - self._listed >= LIST_S:
                self._tree = [(root := psutil.Process(self.pid)), *root.children(recursive=True)]
                self._listed = time.monotonic()
            resident = 0
            for process in self._tree:
                with suppress(psutil.NoSuchProcess):  # it ended since it was listed
                    resident += process.memory_info().rss
            self.peak_rss_bytes = max(self.peak_rss_bytes, resident)
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):  # an ended process has none
                    self.own_peak_rss_bytes = int(line.split()[1]) * 1024


def run(program: Program, log: Path, *servers: Child) -> Child:
    """Run ``program`` to its end, and sample its memory and that of the ``servers`` it uses meanwhile.

    Raises:
        ProgramFailed: it, or a server, ended with an error.
    """
    log.unlink(missing_ok=True)
    child = Child(program, log)

    def sample() -> None:
        for each in (child, *servers):
            each.sample()

    try:
        local.wait_for(child, *servers, watch=sample)
    finally:
        child.stop()
    return child


@contextmanager
def critic_server(directory: Path, overrides: Sequence[str]) -> Iterator[tuple[Child, int]]:
    """A running critic server and its port."""
    critic = Child(server("serve_ppo_critic", directory, *overrides), directory / "server.log")
    try:
        yield critic, int(critic.ready(READY_TIMEOUT_S)["port"])
    finally:
        critic.stop()


def run_actor(
    directory: Path, overrides: Sequence[str], critic: tuple[Child, int] | None = None
) -> tuple[Child, list[dict[str, Any]]]:
    """Train to the end, with the critic server at a port if given; returns the child and its metrics.jsonl."""
    where = [] if critic is None else [f"remote_critic_rm.port={critic[1]}"]
    program = trainer("train_ppo_actor", directory, *where, *overrides)
    child = run(program, directory / "actor.log", *([] if critic is None else [critic[0]]))
    return child, [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def run_json(command: Sequence[object], log: Path) -> dict[str, Any]:
    """Run a script whose last line of output is a JSON object, and return that object."""
    run(Program(log.stem, [str(word) for word in command]), log)
    return dict(json.loads(log.read_text().splitlines()[-1]))
