"""Faults that may happen to a chaos run: each is a function of the run."""

import contextlib
import json
import random
import shutil
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from nemo_style_rlhf.critic_service.remote_critic import RemoteCritic
from nemo_style_rlhf.launch.interrupt import weights_in_memory
from nemo_style_rlhf.launch.program import Program, server, trainer
from nemo_style_rlhf.schema.remote_critic import RemoteCriticConfig
from nemo_style_rlhf.wire import messages
from nemo_style_rlhf.wire.connection import ServerUnreachable
from nemo_style_rlhf.wire.secret import own_token
from tests.fuzz.fuzzer import JSON_CALLS, valid_infer, valid_json, valid_train
from tests.support.ppo_runs import server_overrides
from tests.support.processes import Process, process_below

if TYPE_CHECKING:
    from tests.chaos.run import Run

TIMEOUT_S = 5.0
"""Timeout of the actor's calls; a stalled call takes longer."""
FULL_DISK_BYTES = 2**18
"""Limit on the size of a file, which a model's file exceeds."""
PAUSE_S = 60.0
"""Duration of a pause of a process."""
HICCUP_S = 0.5
"""Duration of one that nobody should notice."""
INTRUDER_S = 60.0
"""Time within which a second process on a folder in use must be refused."""


class Broken(ConnectionError):
    """Ends the message under way."""


def kill_actor(run: "Run") -> None:
    assert run.actor is not None
    run.actor.kill()
    raise Broken


def kill_server(run: "Run") -> None:
    run.server.kill()
    raise Broken


def kill_both(run: "Run") -> None:
    run.kill_both()
    raise Broken


def kill_tritonserver(run: "Run") -> None:
    """Kill Triton, or the front door of a server without it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in answering(run)[:1]:
            each.kill()


def kill_endpoint(run: "Run") -> None:
    """Kill a descendant of tritonserver, or the supervisor of the front door."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if inner := answering(run)[1:]:
            run.draw.choice(inner).kill()


def kill_parents_of_hung_endpoint(run: "Run") -> None:
    """Kill both parents at the same time, so that neither tritonserver nor the server process can end the endpoint; without
    Triton, the parent of a front door that hangs."""
    with contextlib.suppress(psutil.NoSuchProcess):
        server = psutil.Process(run.server.pid)
        if run.kind.backend == "native" and (doors := answering(run)[:1]):
            doors[0].suspend()
            server.kill()
        elif endpoints := [each for tritonserver in answering(run)[:1] for each in tritonserver.children()]:
            run.draw.choice(endpoints).suspend()
            answering(run)[0].kill()
            server.kill()


def answering(run: "Run") -> list[psutil.Process]:
    """tritonserver and its descendants; or the front door and its supervisor. Empty while there are none."""
    below = psutil.Process(run.server.pid).children(recursive=True)
    if run.kind.backend == "native":
        return [
            each for door in below if "front_door" in " ".join(door.cmdline()) for each in (door, door.parent()) if each
        ]
    return [each for top in below if top.name() == "tritonserver" for each in (top, *top.children(recursive=True))]


def cut_connection(run: "Run") -> None:
    raise Broken


def stall(run: "Run") -> None:
    time.sleep(TIMEOUT_S + 2)
    raise Broken


def deliver_late(run: "Run") -> None:
    """Deliver a message when its sender has long sent it again."""
    time.sleep(TIMEOUT_S + 2)


def terminate_actor(run: "Run") -> None:
    assert run.actor is not None
    run.actor.signal(signal.SIGTERM)


def preempt_actor(run: "Run") -> None:
    assert run.actor is not None
    run.actor.signal(signal.SIGUSR1)


def terminate_server(run: "Run") -> None:
    run.server.signal(signal.SIGTERM)


def take_over(run: "Run") -> None:
    """Take the lease as a second actor would, which ends at once, at the latest when there is no server."""
    settings = RemoteCriticConfig(port=run.port, retries=0)
    with contextlib.suppress(ServerUnreachable), RemoteCritic(settings) as intruder:
        status = intruder.status()
        intruder.handshake(tokenizer_digest=status.tokenizer_digest, vocab_size=status.vocab_size, needs_rewards=False)
        intruder.acquire("intruder")


def damage(folder: Path, draw: random.Random) -> None:
    """Damage one bit of any file, records and manifests included, or everything from a random position on."""
    path = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size))
    content = bytearray(path.read_bytes())
    where = draw.randrange(len(content))
    if draw.random() < 0.5:
        content[where] ^= 1
    else:
        del content[where:]
    path.write_bytes(content)


def damage_actor_checkpoint(run: "Run") -> None:
    """Damage the last of several actor checkpoints: a run that loses its only one cannot go on."""
    run.kill_both()
    if len(steps := run.committed()) > 1 and not run.over:
        damage(run.folder / "actor" / "checkpoints" / f"step_{steps[-1]:06d}", run.draw)
    raise Broken


def damage_critic_checkpoint(run: "Run") -> None:
    run.kill_both()
    if len(steps := run.committed()) > 1 and not run.over:
        for checkpoint in (run.folder / "critic" / "checkpoints").glob(
            f"*-step_{steps[-1]:06d}/critic"
        ):  # one match, if it is not lost
            damage(checkpoint, run.draw)
    raise Broken


def limit_files(process: Process, size: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(process.pid).rlimit(psutil.RLIMIT_FSIZE, (size, psutil.RLIM_INFINITY))


def fill_actors_disk(run: "Run") -> None:
    assert run.actor is not None
    limit_files(run.actor, FULL_DISK_BYTES)


def fill_servers_disk(run: "Run") -> None:
    limit_files(run.server, FULL_DISK_BYTES)


def slow_disk(folder: Path) -> Path:
    return folder / "slow_disk"


def slow_both_disks(run: "Run") -> None:
    """Slow down both disks until the next fault."""
    slow_disk(run.folder).touch()


def processes_below(process: Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    return []


def pause(processes: list[psutil.Process], seconds: float = PAUSE_S) -> None:
    """Send SIGSTOP, and SIGCONT later."""

    def signal_all(number: signal.Signals) -> None:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    signal_all(signal.SIGSTOP)
    timer = threading.Timer(seconds, signal_all, [signal.SIGCONT])
    timer.daemon = True
    timer.start()


def pause_server(run: "Run") -> None:
    """Pause the server process, alone or with all its children."""
    processes = processes_below(run.server)
    pause(processes if run.draw.random() < 0.5 else processes[:1])


def pause_actor(run: "Run") -> None:
    assert run.actor is not None
    pause(processes_below(run.actor))


def engines_of(run: "Run") -> list[psutil.Process]:
    assert run.actor is not None
    return [each for each in processes_below(run.actor) if "serve_engine" in " ".join(command_of(each))]


def command_of(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def kill_engine(run: "Run") -> None:
    with contextlib.suppress(psutil.NoSuchProcess, IndexError):
        run.draw.choice(engines_of(run)).kill()


def kill_every_engine(run: "Run") -> None:
    for engine in engines_of(run):
        with contextlib.suppress(psutil.NoSuchProcess):
            engine.kill()


def kill_door_of_engine(run: "Run") -> None:
    """Kill the front door alone: the engine behind it can be asked no more, and ends."""
    with contextlib.suppress(psutil.NoSuchProcess, IndexError, StopIteration):
        process_below(run.draw.choice(engines_of(run)).pid, "front_door").kill()


def pause_engine(run: "Run") -> None:
    """Pause an engine for longer than an engine may hang, or only for a moment."""
    with contextlib.suppress(IndexError):
        pause([run.draw.choice(engines_of(run))], run.draw.choice([PAUSE_S, HICCUP_S]))


def damage_published_weights(run: "Run") -> None:
    """Damage a file of any version, and kill the actor: engines of that start refuse it, those of the next get other files."""
    assert run.actor is not None
    with contextlib.suppress(OSError, IndexError):  # there is no version, or it has just gone
        damage(weights_in_memory(run_id(run)), run.draw)
    run.actor.kill()
    raise Broken


def run_id(run: "Run") -> str:
    for manifest in sorted((run.folder / "actor" / "checkpoints").glob("step_*/manifest.json")):
        with contextlib.suppress(OSError, ValueError):
            return str(json.loads(manifest.read_bytes())["run_id"])
    return ""


def hang_up(run: "Run") -> None:
    """Have clients that know the token send every call, or a part of it, and hang up."""
    token = own_token()
    assert token is not None
    for raw in (
        valid_infer(),
        valid_train("nobody's"),
        *(valid_json("nobody's", number) for number in range(JSON_CALLS)),
    ):
        body, headers = raw.body()
        lines = "".join(f"{name}: {value}\r\n" for name, value in (headers | {messages.TOKEN_HEADER: token}).items())
        head = f"POST /v2/models/{raw.model}/infer HTTP/1.1\r\nHost: c\r\n{lines}Content-Length: {len(body)}\r\n\r\n"
        for _ in range(3):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", run.port), timeout=5) as link:
                link.sendall(head.encode() + body[: run.draw.choice([len(body), len(body) // 2, 0])])


def fill_shared_memory(run: "Run") -> None:
    """Fill /dev/shm for a while."""
    filler = Path(f"/proc/{run.shm}/root/dev/shm/filler")  # a server may have gone when the time is up
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(bytes(2**20))
    timer = threading.Timer(TIMEOUT_S, lambda: filler.unlink(missing_ok=True))
    timer.daemon = True
    timer.start()


def second_actor(run: "Run") -> None:
    assert run.actor is not None
    where = f"remote_critic_rm.port={run.proxy_port}"
    intrude(run, run.actor, trainer("train_ppo_actor", run.folder / "actor", where, *run.actor_overrides()))


def second_server(run: "Run") -> None:
    second = server("serve_ppo_critic", run.folder / "critic", *server_overrides(run.inputs))
    intrude(run, run.server, replace(second, ready_file=None))  # the owner's, which a start would remove


def intrude(run: "Run", owner: Process, program: Program) -> None:
    """Start a second process on the folder of ``owner``, once that owns it: it is refused, unless the owner ends meanwhile."""
    folder = owner.log.parent
    deadline = time.monotonic() + INTRUDER_S
    while owner.poll() is None and owner_of(folder) != owner.pid and time.monotonic() < deadline:
        time.sleep(0.1)
    if owner_of(folder) != owner.pid:
        return
    log = run.folder / f"intruder{len(run.happened)}.log"
    intruder = Process(program, log)
    while intruder.poll() is None and owner.poll() is None and time.monotonic() < deadline + INTRUDER_S:
        time.sleep(0.1)
    intruder.kill()
    if f"(process {owner.pid} on " not in intruder.output() and owner.poll() is None:
        run.failures.append(f"a second process on {folder.name} was not refused: {intruder.output()[-3000:]}")


def owner_of(folder: Path) -> int | None:
    """The id of the process that owns the folder."""
    for record in folder.glob(".owner_*.json"):
        with contextlib.suppress(OSError, ValueError):
            return int(json.loads(record.read_bytes())["pid"])
    return None


def lose_actors_checkpoints(run: "Run") -> None:
    shutil.rmtree(run.folder / "actor" / "checkpoints", ignore_errors=True)
    run.lost = True


def lose_critics_checkpoints(run: "Run") -> None:
    shutil.rmtree(run.folder / "critic" / "checkpoints", ignore_errors=True)
    run.lost = True


def replace_by_link(folder: Path) -> None:
    """Replace the folder by a link to an empty one; its user repairs that with :func:`put_back`."""
    elsewhere = folder.with_name("elsewhere")
    elsewhere.mkdir(exist_ok=True)
    if folder.is_dir() and not folder.is_symlink():
        folder.rename(folder.with_name("away"))
        folder.symlink_to(elsewhere)


def link_actors_checkpoints(run: "Run") -> None:
    """Replace the folder while the actor runs: a link that exists at its start is the user's choice of a place."""
    assert run.actor is not None
    if run.actor.poll() is None and any(sign in run.said() for sign in ("resumed from step", "PPO 1/")):
        replace_by_link(run.folder / "actor" / "checkpoints")


def link_critics_checkpoints(run: "Run") -> None:
    if owner_of(run.folder / "critic") == run.server.pid:
        replace_by_link(run.folder / "critic" / "checkpoints")


def put_back(folder: Path) -> str | None:
    """Undo :func:`replace_by_link`, and return a sentence about files that were wrongly written through the link."""
    if not folder.is_symlink():
        return None
    written = sorted(str(path) for path in folder.rglob("*"))
    folder.unlink()
    folder.with_name("away").rename(folder)
    return f"written through the link {folder}: {written}" if written else None


FAULTS = [
    kill_actor, kill_server, kill_both, kill_tritonserver, kill_endpoint, cut_connection, stall, deliver_late,
    terminate_actor, preempt_actor, terminate_server, take_over, damage_actor_checkpoint, damage_critic_checkpoint,
    fill_actors_disk, fill_servers_disk, slow_both_disks, pause_server, pause_actor, hang_up, fill_shared_memory,
    second_actor, second_server, lose_actors_checkpoints, lose_critics_checkpoints, link_actors_checkpoints,
    link_critics_checkpoints, kill_parents_of_hung_endpoint,
]  # fmt: skip
ENGINE_FAULTS = [kill_engine, kill_every_engine, kill_door_of_engine, pause_engine, damage_published_weights]
"""Faults of runs with engines, drawn as often as all others together."""
