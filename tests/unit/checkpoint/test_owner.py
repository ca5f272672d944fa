"""One owner of a folder: on one machine by the kernel's lock, across machines by a heartbeat. Real processes, killed and stopped.

Another machine is another id of the kernel: its processes share no lock with ours.
"""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nemo_style_rlhf.checkpoint import owner
from nemo_style_rlhf.checkpoint.owner import LOCK_PATIENCE_S, Owner
from nemo_style_rlhf.checkpoint.store import CheckpointStore
from nemo_style_rlhf.critic_service.store import CriticCheckpointStore
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.common import BEAT_S, RunConfig
from nemo_style_rlhf.wire.messages import ProtocolError

OURS, THEIRS = "kernel-a", "kernel-b"
TAKEOVER_S = 5 * BEAT_S
OWN = """
import os, sys, time
from pathlib import Path
from nemo_style_rlhf.checkpoint import owner
owner._mine = owner.Owner(Path(sys.argv[1]), "trainer", float(sys.argv[2]), kernel=sys.argv[3])
print("owned", flush=True)
"""
ITS_CHILD_LIVES_ON = """
if os.fork() == 0:
    os.close(1)
    time.sleep(120)
"""
GOES_ON_WRITING = """
for line in sys.stdin:
    try:
        owner.require_owned()
        print("written", flush=True)
    except owner.UserError as error:
        print(error, flush=True)
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """``start(kernel, then)``: a process that owns ``tmp_path`` and goes on with the code ``then``."""
    started: list[subprocess.Popen[str]] = []

    def process(kernel: str, then: str = "time.sleep(120)") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", OWN + then, str(tmp_path), str(TAKEOVER_S), kernel]
        started.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        )
        stdout = started[-1].stdout
        assert stdout is not None and stdout.readline() == "owned\n"
        return started[-1]

    yield process
    for each in started:
        os.killpg(each.pid, signal.SIGKILL)
        each.communicate()


def asked(process: subprocess.Popen[str]) -> str:
    """What a process that GOES_ON_WRITING says to its next write."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline()


def take(folder: Path, kernel: str = OURS) -> float:
    """Seconds until the folder was this process's, which leaves it again."""
    began = time.monotonic()
    Owner(folder, "trainer", TAKEOVER_S, kernel=kernel).end()
    return time.monotonic() - began


@pytest.mark.slow("waits for heartbeats that do not come")
@pytest.mark.parametrize("stopped", [False, True])
def test_a_second_process_of_one_machine_is_told_of_the_first_even_of_a_stopped_one(
    start: Start, tmp_path: Path, stopped: bool
) -> None:
    first = start(OURS)
    if stopped:
        first.send_signal(signal.SIGSTOP)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.suffix == ".json"}
    began = time.monotonic()
    with pytest.raises(
        UserError, match=rf"run\.output_dir={tmp_path} is in use by another trainer \(process {first.pid} on "
    ):
        take(tmp_path)
    assert time.monotonic() - began < LOCK_PATIENCE_S + 2
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.suffix == ".json"} == before
    Owner(tmp_path, "server", TAKEOVER_S, kernel=OURS).end()  # another role may share the folder


def test_no_other_user_can_hold_the_lock_and_all_can_see_the_heartbeat(tmp_path: Path) -> None:
    """Whoever can open a file can lock it, and would keep every start of the run waiting."""
    owned = Owner(tmp_path, "trainer", TAKEOVER_S, kernel=OURS)
    modes = {path.name.removeprefix(".owner_trainer."): path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes[f"{OURS}.lock"] == 0o600 and modes[OURS] & 0o444 == 0o444
    owned.end()
    assert list(tmp_path.iterdir()) == []


def test_one_at_a_time_owns_a_folder_that_many_take_and_leave_as_they_found_it(tmp_path: Path) -> None:
    inside: list[int] = []

    def come_and_go(_: int) -> int:
        for _ in range(20):
            mine = Owner(tmp_path, "trainer", TAKEOVER_S, kernel=OURS)
            inside.append(1)
            alone = len(inside)
            time.sleep(0.002)
            inside.pop()
            mine.end()
            if alone > 1:
                return alone
        return 1

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(come_and_go, range(4))) == [1] * 4
    assert list(tmp_path.iterdir()) == []


def test_the_next_one_need_not_wait_for_the_killed_ones_children(start: Start, tmp_path: Path) -> None:
    first = start(OURS, f"{ITS_CHILD_LIVES_ON}\ntime.sleep(120)")
    os.kill(first.pid, signal.SIGKILL)
    assert take(tmp_path) < TAKEOVER_S / 2
    os.killpg(first.pid, 0)  # the child lives


@pytest.mark.slow("waits for heartbeats that do not come")
def test_another_machine_is_refused_as_long_as_the_heart_beats(start: Start, tmp_path: Path) -> None:
    first = start(THEIRS, GOES_ON_WRITING)
    began = time.monotonic()
    with pytest.raises(UserError, match=f"in use by another trainer .process {first.pid} on "):
        take(tmp_path)
    assert time.monotonic() - began < TAKEOVER_S
    assert asked(first) == "written\n"


@pytest.mark.slow("waits for heartbeats that do not come")
def test_another_machine_takes_over_from_a_killed_one_without_a_human(start: Start, tmp_path: Path) -> None:
    first = start(THEIRS)
    first.kill()
    assert TAKEOVER_S <= take(tmp_path) < 3 * TAKEOVER_S
    assert take(tmp_path) < TAKEOVER_S / 2  # the last one ended by itself


@pytest.mark.slow("waits for heartbeats that do not come")
def test_an_owner_that_stood_still_writes_nothing_more(start: Start, tmp_path: Path) -> None:
    """Its late heartbeat does not take the folder back."""
    first = start(THEIRS, GOES_ON_WRITING)
    assert asked(first) == "written\n"
    while not (
        tmp_path / f".owner_trainer.{THEIRS}"
    ).read_bytes():  # its first heartbeat, which would be a sign of life later
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)
    second = Owner(tmp_path, "trainer", TAKEOVER_S, kernel=OURS)
    first.send_signal(signal.SIGCONT)
    sentence = f"is no longer this process's to write to: it is in use by process {os.getpid()} on "
    assert sentence in asked(first)
    time.sleep(2 * BEAT_S)
    assert sentence in asked(first)
    second.require()
    second.end()
    assert ".owner_trainer.json is gone" in asked(first)


@pytest.mark.slow("waits for heartbeats that do not come")
def test_without_locks_the_heartbeat_decides_on_one_machine_too(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system that is mounted without them."""

    def unsupported(*_: object) -> None:
        raise OSError(owner.NO_LOCKS[0], "Function not implemented")

    first = start(OURS)
    monkeypatch.setattr(owner.fcntl, "flock", unsupported)
    with pytest.raises(UserError, match=f"process {first.pid} on "):
        take(tmp_path)
    first.kill()
    assert take(tmp_path) >= TAKEOVER_S


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b'{"id": "x"}', b"[]", b"\xff"])
def test_a_damaged_record_names_nobody(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".owner_trainer.json").write_bytes(content)
    assert take(tmp_path) < TAKEOVER_S / 2


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"run\.output_dir=.*/file/run cannot be written \(Not a directory\): give"):
        take(tmp_path / "file" / "run")


def test_a_process_owns_for_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run and the ranks behind the first own nothing, and leave nothing."""
    run = RunConfig(output_dir=str(tmp_path / "run"))
    with owner.owned(run, "trainer"):
        owner.require_owned()
        assert json.loads((tmp_path / "run" / ".owner_trainer.json").read_bytes())["pid"] == os.getpid()
        (tmp_path / "run" / ".owner_trainer.json").unlink()
        with pytest.raises(UserError, match=r"\.owner_trainer\.json is gone"):
            owner.require_owned()
    owner.require_owned()
    for dry_run, rank in ((True, "0"), (False, "1")):
        monkeypatch.setenv("RANK", rank)
        with owner.owned(RunConfig(output_dir=str(tmp_path / "none"), dry_run=dry_run), "trainer"):
            assert not (tmp_path / "none").exists()


def test_a_folder_that_became_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder = (tmp_path / "checkpoints").resolve()
    owner.require_owned(folder)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=f"{folder} was replaced by a link to {tmp_path / 'elsewhere'} while"):
        owner.require_owned(folder)
    owner.require_owned(folder.resolve())  # a link from the beginning is where the user wants it


def test_neither_store_writes_through_a_link_that_takes_its_folders_place(tmp_path: Path) -> None:
    """Nor deletes behind it; a folder that is only gone is made anew."""
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "step_000001" / "actor").mkdir(parents=True)
    (elsewhere / "run-step_000001" / "critic").mkdir(parents=True)
    before = sorted(elsewhere.rglob("*"))
    store, halves = (
        CheckpointStore(tmp_path / "actor" / "checkpoints", keep_last=1),
        CriticCheckpointStore(tmp_path / "critic"),
    )

    def commit(step: int) -> None:
        with store.whole_or_absent(step):
            (store.begin(step) / "weights").touch()
            store.commit(step, "run", critic={}, state={}, versions={})
        store.prune(step)

    def save(step: int) -> None:
        halves.save(f"run-step_{step:06d}", step, lambda folder: (folder / "weights").touch())
        halves.commit(f"run-step_{step:06d}", keep=1)

    for step in (2, 3):
        commit(step)
        save(step)
        for role in ("actor", "critic"):
            shutil.rmtree(tmp_path / role / "checkpoints")
    assert store.committed_steps() == []
    for role, write in (("actor", commit), ("critic", save)):
        (tmp_path / role / "checkpoints").symlink_to(elsewhere)
        with pytest.raises((UserError, ProtocolError), match=r"replaced by a link|can no longer write to its folder"):
            write(4)
    with pytest.raises(UserError, match="replaced by a link"), store.whole_or_absent(1):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(UserError, match="replaced by a link"):
        store.prune(9)
    assert sorted(elsewhere.rglob("*")) == before
