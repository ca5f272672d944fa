"""Faults at random moments of a run that is started again whenever it ends: `make chaos FAULTS=40 SEED=1`.

A fault comes with a message between actor and server, or at a time of its own: while the actor loads, decodes or writes.
Whatever happens, the run must end with the bits of one that nobody disturbed.
"""

import argparse
import contextlib
import itertools
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from nemo_style_rlhf.checkpoint.store import CheckpointStore
from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.critic_service.client import RemoteCritic, ServerUnreachable
from nemo_style_rlhf.critic_service.secret import own_token
from nemo_style_rlhf.schema.remote_critic import RemoteCriticConfig
from tests.integration.critic_server import left_of
from tests.integration.fuzzer import JSON_CALLS, valid_infer, valid_json, valid_train
from tests.integration.processes import Process, proxy, run_pair, start_actor, start_server
from tests.integration.test_ppo import STEPS, actor_overrides, metrics, save_inputs, server_overrides, without_timers
from tests.integration.warm import SLOW_DISK_PATH

TIMEOUT_S = 5.0
"""Of the actor's calls; a stalled one takes longer."""
FULL_DISK_BYTES = 2**18
"""A file may not grow beyond it; a model's does."""
MESSAGES = 30
"""A fault comes after up to as many messages, questions for the status not counted; a PPO step is about ten."""
PATIENCE_S = 12.0
"""Or after up to this time, in which an actor has loaded and made its first steps."""
RUN_TIMEOUT_S = 400.0
PAUSE_S = 60.0
"""A paused process stands still for so long."""
SHM_BYTES = 2**28
OWN_SHM = [
    "unshare", "--map-root-user", "--mount", "sh", "-c", f'mount -t tmpfs -o size={SHM_BYTES} tmpfs /dev/shm && exec "$@"', "sh",
]  # fmt: skip
"""Runs a command that has a /dev/shm of its own, which may be filled."""
DROPOUT = "model.disable_dropout=false"
"""As the policy's config has it: the same in every step that is taken again."""


class Broken(ConnectionError):
    """Ends the message under way."""


@dataclass
class Run:
    """Server and actor below ``folder``, and what happens to them."""

    folder: Path
    inputs: Path
    server: Process
    port: int
    faults: list[Callable[["Run"], None]]
    """Still to come."""
    draw: random.Random
    actor: Process | None = None
    happened: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._draw_moment()

    def _draw_moment(self) -> None:
        """Of the next fault."""
        timed = self.draw.random() < 0.3
        self._messages = 2**62 if timed else self.draw.randint(1, MESSAGES)
        self._moment = time.monotonic() + self.draw.uniform(0, PATIENCE_S) if timed else float("inf")

    def happens(self, where: str, *, message: bool) -> None:
        """The next fault, if this is its moment.

        Raises:
            Broken: the message under way ends with it.
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

    def kill_both(self) -> None:
        assert self.actor is not None
        self.actor.kill()
        self.server.kill()


def slow_disk(folder: Path) -> Path:
    return folder / "slow_disk"


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": SLOW_DISK_PATH, "SLOW_DISK": str(slow_disk(folder))}


def start_chaos_server(folder: Path, inputs: Path) -> tuple[Process, int]:
    return start_server(folder / "critic", *server_overrides(inputs), cold=OWN_SHM, environment=environment(folder))


def kill_actor(run: Run) -> None:
    assert run.actor is not None
    run.actor.kill()
    raise Broken


def kill_server(run: Run) -> None:
    run.server.kill()
    raise Broken


def kill_both(run: Run) -> None:
    run.kill_both()
    raise Broken


def kill_tritonserver(run: Run) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(run.server.pid).children(recursive=True):
            if child.name() == "tritonserver":
                child.kill()


def kill_endpoint(run: Run) -> None:
    """A process of tritonserver's, or one of that's own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(run.server.pid).children(recursive=True)
        if inner := [child for child in children if child.ppid() != run.server.pid]:
            run.draw.choice(inner).kill()


def cut_connection(run: Run) -> None:
    raise Broken


def stall(run: Run) -> None:
    time.sleep(TIMEOUT_S + 2)
    raise Broken


def deliver_late(run: Run) -> None:
    """When its sender has long sent it again."""
    time.sleep(TIMEOUT_S + 2)


def terminate_actor(run: Run) -> None:
    assert run.actor is not None
    run.actor.signal(signal.SIGTERM)


def preempt_actor(run: Run) -> None:
    assert run.actor is not None
    run.actor.signal(signal.SIGUSR1)


def terminate_server(run: Run) -> None:
    run.server.signal(signal.SIGTERM)


def take_over(run: Run) -> None:
    """As a second actor would; it leaves at once, at the latest when there is no server."""
    settings = RemoteCriticConfig(port=run.port, retries=0)
    with contextlib.suppress(ServerUnreachable), RemoteCritic(settings) as intruder:
        status = intruder.status()
        intruder.handshake(tokenizer_digest=status.tokenizer_digest, vocab_size=status.vocab_size, needs_rewards=False)
        intruder.acquire("intruder")


def damage(folder: Path, draw: random.Random) -> None:
    """Of any file, what it says about itself or others included: one bit, or all from somewhere on."""
    path = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size))
    content = bytearray(path.read_bytes())
    where = draw.randrange(len(content))
    if draw.random() < 0.5:
        content[where] ^= 1
    else:
        del content[where:]
    path.write_bytes(content)


def damage_actor_half(run: Run) -> None:
    """Of the last of several checkpoints: a run whose only one is lost cannot go on."""
    run.kill_both()
    if len(steps := run.committed()) > 1 and not run.over:
        damage(run.folder / "actor" / "checkpoints" / f"step_{steps[-1]:06d}", run.draw)
    raise Broken


def damage_critic_half(run: Run) -> None:
    run.kill_both()
    if len(steps := run.committed()) > 1 and not run.over:
        (half,) = (run.folder / "critic" / "checkpoints").glob(f"*-step_{steps[-1]:06d}/critic")
        damage(half, run.draw)
    raise Broken


def limit_files(process: Process, size: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(process.pid).rlimit(psutil.RLIMIT_FSIZE, (size, psutil.RLIM_INFINITY))


def fill_actors_disk(run: Run) -> None:
    assert run.actor is not None
    limit_files(run.actor, FULL_DISK_BYTES)


def fill_servers_disk(run: Run) -> None:
    limit_files(run.server, FULL_DISK_BYTES)


def slow_both_disks(run: Run) -> None:
    """Until the next fault."""
    slow_disk(run.folder).touch()


def processes_below(process: Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    return []


def pause(processes: list[psutil.Process]) -> None:
    """SIGSTOP, and SIGCONT later."""

    def signal_all(number: signal.Signals) -> None:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    signal_all(signal.SIGSTOP)
    timer = threading.Timer(PAUSE_S, signal_all, [signal.SIGCONT])
    timer.daemon = True
    timer.start()


def pause_server(run: Run) -> None:
    """The process itself, or with all it has started."""
    processes = processes_below(run.server)
    pause(processes if run.draw.random() < 0.5 else processes[:1])


def pause_actor(run: Run) -> None:
    assert run.actor is not None
    pause(processes_below(run.actor))


def hang_up(run: Run) -> None:
    """Clients that know the token send every call, or a part of it, and are gone."""
    token = own_token()
    assert token is not None
    for raw in (
        valid_infer(),
        valid_train("nobody's"),
        *(valid_json("nobody's", number) for number in range(JSON_CALLS)),
    ):
        body, headers = raw.body()
        lines = "".join(f"{name}: {value}\r\n" for name, value in (headers | {protocol.TOKEN_HEADER: token}).items())
        head = f"POST /v2/models/{raw.model}/infer HTTP/1.1\r\nHost: c\r\n{lines}Content-Length: {len(body)}\r\n\r\n"
        for _ in range(3):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", run.port), timeout=5) as link:
                link.sendall(head.encode() + body[: run.draw.choice([len(body), len(body) // 2, 0])])


def fill_shared_memory(run: Run) -> None:
    """For a while."""
    filler = Path(f"/proc/{run.server.pid}/root/dev/shm/filler")
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(bytes(2**20))
    timer = threading.Timer(TIMEOUT_S, lambda: filler.unlink(missing_ok=True))
    timer.daemon = True
    timer.start()


FAULTS = [
    kill_actor, kill_server, kill_both, kill_tritonserver, kill_endpoint, cut_connection, stall, deliver_late,
    terminate_actor, preempt_actor, terminate_server, take_over, damage_actor_half, damage_critic_half,
    fill_actors_disk, fill_servers_disk, slow_both_disks, pause_server, pause_actor, hang_up, fill_shared_memory,
]  # fmt: skip


def chaos(folder: Path, *, faults: int, seed: int) -> list[str]:
    """As many runs as it takes for all faults to happen, each compared with a run without any; what happened."""
    inputs = save_inputs(folder / "inputs")
    (folder / "undisturbed").mkdir()
    run_pair(folder / "undisturbed", server_overrides(inputs), [*actor_overrides(inputs), DROPOUT])
    draw = random.Random(seed)
    left = draw.sample(FAULTS, len(FAULTS)) + draw.choices(FAULTS, k=max(0, faults - len(FAULTS)))
    left = left[:faults]
    happened: list[str] = []
    numbers = itertools.count()
    while left:
        run = disturbed_run(folder / f"run{next(numbers)}", inputs, left, draw)
        happened += run.happened
        left = left[len(run.happened) :]
        check(run, folder / "undisturbed")
    return happened


def disturbed_run(folder: Path, inputs: Path, faults: list[Callable[[Run], None]], draw: random.Random) -> Run:
    (folder / "critic").mkdir(parents=True)
    run = Run(folder, inputs, *start_chaos_server(folder, inputs), list(faults), draw)
    deadline = time.monotonic() + RUN_TIMEOUT_S * (1 + len(faults) / 10)

    def watch(way: str, endpoint: str) -> None:
        run.happens(f"at the {way} of {endpoint}", message=endpoint != "critic_status")

    with proxy(lambda: run.port, watch) as port:
        try:
            while (code := keep_running(run, port)) != 0:
                assert time.monotonic() < deadline, (run.happened, code, run.actor and run.actor.output()[-6000:])
                time.sleep(0.05)
                with contextlib.suppress(Broken):
                    run.happens("at a time of its own", message=False)
        finally:
            if run.actor is not None:
                run.actor.kill()
            run.server.kill()
    return run


def keep_running(run: Run, proxy_port: int) -> int | None:
    """Start again what has ended; the actor's exit code."""
    if run.server.poll() is not None:
        run.server, run.port = start_chaos_server(run.folder, run.inputs)
    code = None if run.actor is None else run.actor.poll()
    if run.actor is None or code not in (None, 0):
        limit_files(run.server, psutil.RLIM_INFINITY)  # somebody has made room
        patience = [f"remote_critic_rm.{name}={TIMEOUT_S}" for name in ("infer_timeout_s", "train_timeout_base_s")]
        overrides = [*actor_overrides(run.inputs), DROPOUT, *patience]
        run.actor = start_actor(run.folder / "actor", proxy_port, *overrides, environment=environment(run.folder))
    return code


def check(run: Run, undisturbed: Path) -> None:
    """It ended as if nothing had happened.

    Raises:
        AssertionError: it did not.
    """
    story = "; ".join(run.happened)
    for left, right in zip(
        *(without_timers(metrics(folder / "actor")) for folder in (run.folder, undisturbed)), strict=True
    ):
        assert left == right, story
    exports = [
        [
            folder / "actor/export/model.safetensors",
            *sorted((folder / "critic/exports").glob("*/critic/model.safetensors")),
        ]
        for folder in (run.folder, undisturbed)
    ]
    for left, right in zip(*exports, strict=True):
        assert left.read_bytes() == right.read_bytes(), story
    store = CheckpointStore(run.folder / "actor" / "checkpoints", keep_last=2)
    readable = [(manifest.step, manifest.critic["critic_step"]) for manifest in store.undamaged()]
    assert readable == [(step, step) for step in reversed(store.committed_steps())] and readable[0][0] == STEPS, story
    assert not (orphans := left_of(processes_of(run.folder))), (story, orphans)


def processes_of(folder: Path) -> list[psutil.Process]:
    """By what they were started with; Triton's know ``folder`` by the environment alone."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "environ"])
        if str(folder) in " ".join([*(process.info["cmdline"] or []), *(process.info["environ"] or {}).values()])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos_") as folder:
        happened = chaos(Path(folder), faults=arguments.faults, seed=arguments.seed)
    print(f"seed {arguments.seed}: {len(happened)} faults, and every run ended with the undisturbed one's bits")


if __name__ == "__main__":
    sys.exit(main())
