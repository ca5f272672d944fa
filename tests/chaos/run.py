"""Faults at random moments of a run that is started again whenever it ends:
`make chaos FAULTS=40 SEED=1 ENGINES=2 STALENESS=1 BACKEND=native`.

A fault comes with a message between actor and server, or at a time of its own: while the actor loads, decodes or writes.
Whatever happens, the run must end with the bits of one that nobody disturbed, and that samples in the trainer's process, one
thing after another.
"""

import argparse
import contextlib
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from nemo_style_rlhf.checkpoint.store import CheckpointStore
from tests.chaos.faults import ENGINE_FAULTS, FAULTS, TIMEOUT_S, Broken, limit_files, put_back, slow_disk
from tests.support.critic_server import left_of
from tests.support.metrics import metrics, without_timers
from tests.support.paths import ROOT
from tests.support.ppo_runs import STEPS, actor_overrides, save_inputs, server_overrides
from tests.support.processes import Process, proxy, run_pair, start_actor, start_server
from tests.support.warm import SLOW_DISK_PATH

MESSAGES = 30
"""A fault happens after at most this many messages, status requests not counted; a PPO step takes about ten."""
PATIENCE_S = 12.0
"""Or it happens after at most this time, within which an actor has loaded and made its first steps."""
RUN_TIMEOUT_S = 400.0
SHM_BYTES = 2**28
OWN_SHM = [
    "unshare", "--map-root-user", "--mount", "sh", "-c", f'mount -t tmpfs -o size={SHM_BYTES} tmpfs /dev/shm && exec "$@"', "sh",
]  # fmt: skip
"""Runs a command with its own /dev/shm, which may be filled."""
DROPOUT = "model.disable_dropout=false"
"""Keeps the dropout of the policy's config, which must be the same when a step is repeated."""


@dataclass(frozen=True)
class Kind:
    """The settings of the run to which the faults happen."""

    engines: int = 0
    staleness: int = 0
    backend: str = "pytriton"
    """The critic server's ``server.backend``."""

    @property
    def faults(self) -> list[Callable[["Run"], None]]:
        return FAULTS + ENGINE_FAULTS * (len(FAULTS) // len(ENGINE_FAULTS)) if self.engines else FAULTS

    def overrides(self, inputs: Path, *, disturbed: bool) -> list[str]:
        own = [*actor_overrides(inputs), DROPOUT, f"algorithm.staleness={self.staleness}"]
        if self.staleness:
            own += ["algorithm.correction.kind=tis", "checkpoint.keep_best=false"]
        if disturbed:
            own += [f"remote_critic_rm.{name}={TIMEOUT_S}" for name in ("infer_timeout_s", "train_timeout_base_s")]
            own += [
                f"generation.engines.{setting}" for setting in (f"count={self.engines}", "hung_after_s=5", "restarts=9")
            ]
        return own


@dataclass
class Run:
    """Server and actor below ``folder``, and the faults that happen to them."""

    folder: Path
    kind: Kind
    inputs: Path
    server: Process
    port: int
    faults: list[Callable[["Run"], None]]
    """Faults that have not happened yet."""
    draw: random.Random
    shm: int
    """The process whose /dev/shm all its servers share."""
    actor: Process | None = None
    happened: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Events that should not have happened."""
    proxy_port: int = 0
    actors_log: int = 0
    """Bytes of the actor's log from before its last start."""
    lost: bool = False
    """Whether checkpoints were taken away."""
    elsewhere: bool = False
    """Whether the server started while a link led to another folder, which it goes on to use."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._draw_moment()

    def _draw_moment(self) -> None:
        """Draw the moment of the next fault."""
        timed = self.draw.random() < 0.3
        self._messages = 2**62 if timed else self.draw.randint(1, MESSAGES)
        self._moment = time.monotonic() + self.draw.uniform(0, PATIENCE_S) if timed else float("inf")

    def happens(self, where: str, *, message: bool) -> None:
        """Apply the next fault, if this is its moment.

        Raises:
            Broken: the fault ends the message under way.
        """
        with self._lock:
            self._messages -= message
            if not self.faults or (self._messages > 0 and time.monotonic() < self._moment) or self.over:
                return
            fault = self.faults.pop(0)
            self._draw_moment()
            steps = self.committed()
            self.happened.append(f"{fault.__name__} {where} after step {steps[-1] if steps else None}")
        print(self.happened[-1], flush=True)
        slow_disk(self.folder).unlink(missing_ok=True)
        fault(self)

    def committed(self) -> list[int]:
        return CheckpointStore(self.folder / "actor" / "checkpoints", keep_last=2).committed_steps()

    @property
    def over(self) -> bool:
        return self.actor is not None and self.actor.poll() == 0

    def said(self) -> str:
        """The actor's output since its last start."""
        assert self.actor is not None
        return self.actor.log.read_bytes()[self.actors_log :].decode(errors="replace")

    def actor_overrides(self) -> list[str]:
        return self.kind.overrides(self.inputs, disturbed=True)

    def kill_both(self) -> None:
        assert self.actor is not None
        self.actor.kill()
        self.server.kill()


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": SLOW_DISK_PATH, "SLOW_DISK": str(slow_disk(folder))}


@contextlib.contextmanager
def own_shm() -> Iterator[int]:
    """The id of a process that has its own /dev/shm."""
    command = [*OWN_SHM, "sh", "-c", "echo mounted && exec sleep infinity"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"mounted\n"
        try:
            yield holder.pid
        finally:
            holder.kill()


def start_chaos_server(folder: Path, kind: Kind, inputs: Path, shm: int) -> tuple[Process, int]:
    there = ["nsenter", f"--target={shm}", "--user", "--mount", "--preserve-credentials", f"--wd={ROOT}"]
    overrides = [*server_overrides(inputs), f"server.backend={kind.backend}"]
    return start_server(folder / "critic", *overrides, cold=there, environment=environment(folder))


def chaos(folder: Path, *, faults: int, seed: int, kind: Kind = Kind()) -> list[str]:
    """Run until all faults have happened, compare each run with one without faults, and return the story."""
    inputs = save_inputs(folder / "inputs")
    (folder / "undisturbed").mkdir()
    run_pair(folder / "undisturbed", server_overrides(inputs), kind.overrides(inputs, disturbed=False))
    draw = random.Random(seed)
    drawn = kind.faults
    left = (draw.sample(drawn, len(drawn)) + draw.choices(drawn, k=max(0, faults - len(drawn))))[:faults]
    happened: list[str] = []
    numbers = itertools.count()
    while left:
        with own_shm() as shm:
            run = disturbed_run(folder / f"run{next(numbers)}", kind, inputs, left, draw, shm)
            happened += run.happened
            left = left[len(run.happened) :]
            check(run, folder / "undisturbed")
    return happened


def disturbed_run(
    folder: Path, kind: Kind, inputs: Path, faults: list[Callable[[Run], None]], draw: random.Random, shm: int
) -> Run:
    (folder / "critic").mkdir(parents=True)
    run = Run(folder, kind, inputs, *start_chaos_server(folder, kind, inputs, shm), list(faults), draw, shm)
    deadline = time.monotonic() + RUN_TIMEOUT_S * (1 + len(faults) / 10)

    def watch(way: str, endpoint: str) -> None:
        run.happens(f"at the {way} of {endpoint}", message=endpoint != "critic_status")

    with proxy(lambda: run.port, watch) as run.proxy_port:
        try:
            while (code := keep_running(run)) != 0:
                assert time.monotonic() < deadline, (run.happened, code, run.actor and run.actor.output()[-6000:])
                time.sleep(0.05)
                with contextlib.suppress(Broken):
                    run.happens("at a time of its own", message=False)
        finally:
            if run.actor is not None:
                run.actor.kill()
            run.server.kill()
    return run


def keep_running(run: Run) -> int | None:
    """Restart processes that have ended, and return the actor's exit code."""
    if run.actor is not None and run.actor.poll() is not None:
        mend(run)
    if run.server.poll() is not None:
        run.elsewhere = (run.folder / "critic" / "checkpoints").is_symlink()
        run.server, run.port = start_chaos_server(run.folder, run.kind, run.inputs, run.shm)
    code = None if run.actor is None else run.actor.poll()
    if run.actor is None or code not in (None, 0):
        limit_files(run.server, psutil.RLIM_INFINITY)  # the user has made room
        log = run.folder / "actor" / "actor.log"
        run.actors_log = log.stat().st_size if log.exists() else 0
        run.actor = start_actor(
            run.folder / "actor", run.proxy_port, *run.actor_overrides(), environment=environment(run.folder)
        )
    return code


def mend(run: Run) -> None:
    """Follow the advice of the ended actor to its user about folders that faults have replaced or taken away."""
    assert run.actor is not None
    for process in ("actor", "critic"):
        if failure := put_back(run.folder / process / "checkpoints"):
            run.failures.append(failure)
    if run.elsewhere:
        run.server.kill()
    sentence = run.said().rpartition("error: ")[2]
    if run.lost and "no checkpoint can be restored" in sentence:
        shutil.rmtree(run.folder / "actor" / "checkpoints")
        run.server.kill()
    if run.lost and "restart the server" in sentence:
        run.server.kill()


def check(run: Run, undisturbed: Path) -> None:
    """Check that the run ended as if nothing had happened.

    Raises:
        AssertionError: it did not.
    """
    story = "; ".join(run.happened)
    assert not run.failures, (story, run.failures)
    for left, right in zip(
        *(without_timers(metrics(folder / "actor")) for folder in (run.folder, undisturbed)), strict=True
    ):
        assert left == right, story
    for pattern in ("actor/export/model.safetensors", "critic/exports/*/critic/model.safetensors"):
        (expected,) = undisturbed.glob(pattern)
        exports = list(run.folder.glob(pattern))  # several of the critic, if the run had to start over
        assert len(exports) == 1 or (exports and run.lost), (story, exports)
        assert all(export.read_bytes() == expected.read_bytes() for export in exports), story
    store = CheckpointStore(run.folder / "actor" / "checkpoints", keep_last=2)
    readable = [(manifest.step, manifest.critic["critic_step"]) for manifest in store.undamaged()]
    assert readable == [(step, step) for step in reversed(store.committed_steps())] and readable[0][0] == STEPS, story
    assert not (orphans := left_of(processes_of(run.folder))), (story, orphans)
    segments = [path for path in Path(f"/proc/{run.shm}/root/dev/shm").iterdir() if path.name != "filler"]
    assert not segments, (story, segments)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Processes of ``folder``, found by their command lines; Triton's have the folder only in their environment."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "environ"])
        if str(folder) in " ".join([*(process.info["cmdline"] or []), *(process.info["environ"] or {}).values()])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engines", type=int, default=0)
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--backend", default="pytriton")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos_") as folder:
        kind = Kind(arguments.engines, arguments.staleness, arguments.backend)
        happened = chaos(Path(folder), faults=arguments.faults, seed=arguments.seed, kind=kind)
    print(f"seed {arguments.seed}: {len(happened)} faults, and every run ended with the undisturbed one's bits")


if __name__ == "__main__":
    sys.exit(main())
