"""A real critic server process for tests, started as a user starts it."""

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest

from nemo_style_rlhf.critic_service.protocol import Status
from nemo_style_rlhf.critic_service.remote_critic import CriticTrainBatch, RemoteCritic
from nemo_style_rlhf.schema.remote_critic import RemoteCriticConfig
from nemo_style_rlhf.wire.messages import Array
from tests.support import warm
from tests.support.digests import digest_of_files
from tests.support.paths import ACTOR_PYTHON, ROOT, SERVER_PYTHON

START_TIMEOUT_S = 120.0
VOCABULARY = 64
TOKEN_ENV = "NSR_CRITIC_TOKEN"
KEPT_BYTES = 64 * 2**20
"""Limit on the memory that strangers may make a server keep (:meth:`CriticServer.kept_bytes`)."""
START = "test-step_000000"
"""Checkpoint id of the untrained critic on the shared server."""


only_pytriton = pytest.mark.parametrize("backend", ["pytriton"], indirect=True)


@dataclass
class CriticServer:
    """One server process; ``overrides`` are Hydra overrides on top of a small fp32 model."""

    output_dir: Path
    model: Path
    overrides: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    port: int = 0
    ranks: int = 1
    backend: str = "pytriton"
    cold: bool = False
    """Whether a new process loads its libraries; a forked one also has the arenas of malloc that its parent's threads had."""

    def __post_init__(self) -> None:
        self.output_dir.mkdir(parents=True, exist_ok=True)
        self.ready_file = self.output_dir / "ready.json"
        self.log = self.output_dir / "server.log"
        self.python = SERVER_PYTHON if self.backend == "pytriton" else ACTOR_PYTHON  # which holds both halves then

    def command(self, *extra: str) -> list[str]:
        return [
            str(self.python),
            "servers/serve_ppo_critic.py",
            f"run.output_dir={self.output_dir}",
            f"model.path={self.model}",
            "model.dtype=float32",
            f"server.backend={self.backend}",
            "engine.zero_stage=0",
            "engine.optim.lr=1e-3",
            "engine.optim.eps=1e-5",
            "run.num_threads=1",
            f"server.port={self.port}",
            f"server.ready_file={self.ready_file}",
            *self.overrides,
            *extra,
        ]

    def spawn(self) -> "warm.Forked | subprocess.Popen[bytes]":
        self.ready_file.unlink(missing_ok=True)
        environment = {name: value for name, value in os.environ.items() if name != TOKEN_ENV} | self.environment
        self.process: warm.Forked | subprocess.Popen[bytes]
        if self.cold:
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(
                    self.command(), cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
                )
        else:
            self.process = warm.Forked(
                self.command()[1:], self.log, self.log, python=self.python, ranks=self.ranks, environment=environment
            )
        return self.process

    def start(self) -> "CriticServer":
        self.spawn()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.ready_file.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the server did not start:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.1)
        self.port = json.loads(self.ready_file.read_text())["port"]
        return self

    def checkpoint_digest(self, checkpoint_id: str) -> str:
        """Digest of the weights, optimizer state and schedule in the critic checkpoint."""
        return digest_of_files(self.output_dir / "checkpoints" / checkpoint_id / "critic")

    def processes(self) -> list[psutil.Process]:
        """The processes of the server, of Triton and of the front door."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def kept_bytes(self) -> int:
        """Private memory of these processes, plus their segments in /dev/shm."""
        return kept_by(self.processes())

    def kill(self) -> None:
        """Send SIGKILL, and wait until the server's Triton has gone, too."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        while any(map(runs, children)):
            time.sleep(0.1)

    def terminate(self, timeout_s: float = 60) -> int:
        """Send SIGTERM, and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def close(self) -> None:
        if self.process.poll() is None:
            self.terminate()

    def tritonserver(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in children if child.name() == "tritonserver")

    def config(self, **changes: object) -> RemoteCriticConfig:
        settings = {"port": self.port, "wait_for_server_s": 60.0, "retries": 3, **changes}
        return RemoteCriticConfig(**settings)  # type: ignore[arg-type]

    def client(self, run_id: str = "test", **changes: object) -> RemoteCritic:
        """A connected client with the lease."""
        critic = RemoteCritic(self.config(**changes))
        status = critic.wait_until_ready(lambda line: None)
        agree(critic, status)
        critic.acquire(run_id)
        return critic


def anonymous(process: psutil.Process) -> int:
    """Bytes in memory that no file backs. Pages of a library count as private once the last other process that maps them ends."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


def kept_by(processes: list[psutil.Process]) -> int:
    """Private memory of a server's processes, itself first, plus their segments in /dev/shm."""
    private = sum(map(anonymous, processes))
    mapped = {place.path for process in processes for place in process.memory_maps(grouped=True)}
    shared = {path for path in Path("/dev/shm").iterdir() if str(path) in mapped or str(processes[0].pid) in path.name}
    return private + sum(path.stat().st_blocks * 512 for path in shared)


def runs(process: psutil.Process) -> bool:
    """Whether a process runs. A zombie does not: the orphans of a killed server may never be reaped."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def left_of(processes: list[psutil.Process]) -> list[psutil.Process]:
    """The processes that still run after the seconds in which they notice that their parent has gone."""
    deadline = time.monotonic() + 5
    while (running := list(filter(runs, processes))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return running


def segments_of(processes: list[psutil.Process]) -> set[Path]:
    """The segments of /dev/shm that the processes have mapped."""
    maps = "".join(Path(f"/proc/{process.pid}/maps").read_text() for process in processes)
    return {Path(path) for path in re.findall(r"/dev/shm/\S+", maps)}


def agree(critic: RemoteCritic, status: Status) -> None:
    critic.handshake(tokenizer_digest=status.tokenizer_digest, vocab_size=status.vocab_size, needs_rewards=False)


def sequences(seed: int, count: int = 7, longest: int = 40) -> list[Array]:
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCABULARY, random.integers(2, longest + 1)).astype(np.int32) for _ in range(count)]


def train_batch(seed: int, count: int = 7, mini_batches: list[list[int]] | None = None) -> CriticTrainBatch:
    """Random returns, old values and masks over random sequences; two mini-batches unless told otherwise."""
    random = np.random.default_rng(seed)
    tokens = sequences(seed, count)

    def noise(sequence: Array) -> Array:
        return random.normal(size=len(sequence)).astype(np.float32)

    def mask(sequence: Array) -> Array:
        ones = (random.random(len(sequence)) < 0.7).astype(np.float32)
        ones[0], ones[-1] = 1, 0
        return ones

    halves = [list(range(0, count, 2)), list(range(1, count, 2))]
    return CriticTrainBatch(
        sequences=tokens,
        returns=[noise(sequence) for sequence in tokens],
        old_values=[0.1 * noise(sequence) for sequence in tokens],
        masks=[mask(sequence) for sequence in tokens],
        mini_batches=mini_batches or halves,
    )


def refusal(server: CriticServer, *extra: str, environment: dict[str, str] | None = None) -> str:
    """Start a server that must refuse to start; return its only line. Its exit code must be 2."""
    process = subprocess.run(
        server.command(*extra),
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 2, process.stderr[-2000:]
    lines = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert "Traceback" not in process.stderr
    return lines[0]


def texts(seed: int, count: int) -> tuple[list[str], list[str]]:
    """Prompts and responses."""
    words = [" ".join(f"w{token % 62}" for token in sequence) for sequence in sequences(seed, 2 * count)]
    return words[:count], words[count:]


def long_batch(optimizer_steps: int = 60) -> CriticTrainBatch:
    """Some seconds of training."""
    return train_batch(0, count=64, mini_batches=[list(range(64))] * optimizer_steps)


def wait_until_busy(critic: RemoteCritic) -> str:
    for _ in range(100):
        if (busy := critic.status().busy) and busy.startswith("train"):
            return busy
        time.sleep(0.02)
    raise AssertionError("the server never trained")
