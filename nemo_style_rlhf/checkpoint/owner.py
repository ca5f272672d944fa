"""Lets one process per role, such as the trainer, write to a run's folder. An error tells a newcomer who owns the folder.

On one machine the kernel keeps the lock of the owner: it is released when its process ends, in any way, and a stopped process
keeps it. Machines that share the folder share neither this lock nor a clock. There the owner's heartbeat, a counter in a file,
shows that it lives: a newcomer watches it for ``run.takeover_s`` seconds, and takes the folder over if it stands still. An owner
that was only stopped then finds the newcomer's id in the folder and writes nothing more: :func:`require_owned`.
"""

import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.common import BEAT_S, RunConfig

LOCK_PATIENCE_S = 5.0
"""Seconds to wait for a lock: a killed process releases it only once its memory is freed."""
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of ``flock`` on file systems without locks."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OwnerRecord:
    """Content of ``.owner_<role>.json``. An owner writes it once, when it takes the folder."""

    id: str
    """Random id of the owner."""
    kernel: str
    """Boot id of the owner's machine. Locks hold among all processes with this boot id, containers included."""
    host: str
    pid: int
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class Owner:
    """This process as the owner of ``folder`` in a role."""

    def __init__(self, folder: Path, role: str, takeover_s: float, *, kernel: str) -> None:
        """Take the folder.

        Raises:
            UserError: another process owns the folder, or it cannot be written.
        """
        self._folder, self._role, self._takeover_s = folder.absolute(), role, takeover_s
        self._path = self._folder / f".owner_{role}.json"
        now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        self._mine = OwnerRecord(secrets.token_hex(8), kernel, socket.gethostname(), os.getpid(), now)
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="owner", daemon=True)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._take()
        except OSError as error:
            raise UserError(
                f"run.output_dir={folder} cannot be written ({error.strerror}): give a folder that can"
            ) from error
        self._heart.start()

    def _take(self) -> None:
        pulse = self._pulse(self._mine.kernel)
        lock = _lock_beside(pulse)
        while True:
            self.lock = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)  # any user who can read a file can lock it
            try:
                locked = self._locked()
                if _is_open_as(self.lock, lock):
                    self._enter(locked)
                    self._pulse_file = os.open(pulse, os.O_RDWR | os.O_CREAT, 0o644)
                    return
            except BaseException:
                os.close(self.lock)
                raise
            os.close(self.lock)  # the last owner has removed the file meanwhile

    def _enter(self, locked: bool) -> None:
        found = self._read()
        if found is not None and not (locked and found.kernel == self._mine.kernel):
            self._outwait(found)
        beside = self._path.with_name(f"{self._path.name}.{self._mine.id}")  # two machines may start at once
        beside.write_text(json.dumps(asdict(self._mine)))
        beside.replace(self._path)

    def _locked(self) -> bool:
        """Take the lock, excluding all other processes of this kernel. Returns False if the file system has no locks.

        Raises:
            UserError: another process has the lock.
        """
        deadline = time.monotonic() + LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise self._refusal(self._read()) from error
                time.sleep(0.05)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                return False

    def _outwait(self, found: OwnerRecord) -> None:
        """Return once ``found``, an owner whose lock this process cannot see, has ended or shown no heartbeat for long enough.

        Raises:
            UserError: the owner lives, or another newcomer was faster.
        """
        log.warning(
            "%s was owned by %s: whether that still lives is seen within %g s", self._folder, found, self._takeover_s
        )
        pulse, deadline = self._pulse(found.kernel), time.monotonic() + self._takeover_s
        seen = _content(pulse)
        while time.monotonic() < deadline and (now := self._read()) is not None:
            if now.id != found.id or _content(pulse) != seen:
                raise self._refusal(now)
            time.sleep(BEAT_S / 4)

    def _beat(self) -> None:
        beat = 0
        while True:
            with suppress(OSError):  # a file system that is full or gone: others see no heartbeat
                os.pwrite(self._pulse_file, f"{self._mine.id} {beat:012d}".encode(), 0)
                os.fsync(self._pulse_file)
            if self._ended.wait(BEAT_S):
                return
            beat += 1

    def require(self) -> None:
        """Check that this process still owns the folder.

        Raises:
            UserError: another process owns it now.
        """
        found = self._read()
        if found is None or found.id != self._mine.id:
            why = (
                f"{self._path.name} is gone"
                if found is None
                else f"it is in use by {found}, after this process stood still"
            )
            raise UserError(f"run.output_dir={self._folder} is no longer this process's to write to: {why}")

    def end(self) -> None:
        """Release the folder for the next owner."""
        self._ended.set()
        self._heart.join(BEAT_S)
        with suppress(OSError):
            if (found := self._read()) is not None and found.id == self._mine.id:
                self._path.unlink()
                pulse = self._pulse(self._mine.kernel)
                for path in (pulse, _lock_beside(pulse)):
                    path.unlink()
        if not self._heart.is_alive():  # else the file system hangs, and the lock ends with the process
            os.close(self._pulse_file)
            os.close(self.lock)

    def _pulse(self, kernel: str) -> Path:
        """Path of the file in which the owner among the processes of a kernel writes its heartbeat."""
        return self._folder / f".owner_{self._role}.{kernel}"

    def _read(self) -> OwnerRecord | None:
        """The owner's record; None without an owner, or if the record is unreadable."""
        with suppress(FileNotFoundError, ValueError, TypeError):
            return OwnerRecord(**json.loads(self._path.read_bytes()))
        return None

    def _refusal(self, found: OwnerRecord | None) -> UserError:
        who = "" if found is None else f" ({found})"
        return UserError(
            f"run.output_dir={self._folder} is in use by another {self._role}{who}: end that one first, or give another "
            "run.output_dir"
        )


@dataclass(frozen=True)
class OwnerStatus:
    """An owner as another process finds it."""

    record: OwnerRecord
    lives: bool | None
    """None if the owner runs on another machine or its lock cannot be tested: then a changing ``pulse`` is the sign of life."""
    pulse: bytes | None


def owner_statuses(folder: Path) -> list[OwnerStatus]:
    """Owners of ``folder``, in any role; one that was killed is among them, one that ended normally is not. Writes nothing."""
    found = []
    for path in sorted(folder.glob(".owner_*.json")):
        with suppress(OSError, ValueError, TypeError):
            record = OwnerRecord(**json.loads(path.read_bytes()))
            pulse = path.with_suffix(f".{record.kernel}")
            found.append(OwnerStatus(record, _lives(record, pulse), _content(pulse)))
    return found


def _lives(record: OwnerRecord, pulse: Path) -> bool | None:
    if record.kernel != Path("/proc/sys/kernel/random/boot_id").read_text().strip():
        return None
    try:
        with _lock_beside(pulse).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released at once; a newcomer tries for longer
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:  # no locks, or not ours to read
        return None
    return False


_mine: Owner | None = None
"""The ownership that this process holds: it has one run."""


@contextmanager
def owned(run: RunConfig, role: str) -> Iterator[None]:
    """Own ``run.output_dir`` as ``role``. Only the first rank owns it. A dry run writes elsewhere and does not own it.

    Raises:
        UserError: another process owns the folder, or it cannot be written; nothing in it has been changed.
    """
    global _mine
    if not run.dry_run and os.environ.get("RANK", "0") == "0":
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        _mine = Owner(Path(run.output_dir), role, run.takeover_s, kernel=kernel)
    try:
        yield
    finally:
        release()


def release() -> None:
    """End the ownership that :func:`owned` began, for a process that ends at once."""
    global _mine
    mine, _mine = _mine, None
    if mine is not None:
        mine.end()


def require_owned(*folders: Path) -> None:
    """Check ownership. Call this before every change below ``folders``, given as paths resolved when the process began.

    Raises:
        UserError: this process was stopped for so long that another took its folder over, or a folder has become a link.
    """
    if _mine is not None:
        _mine.require()
    for folder in folders:
        if (leads_to := folder.resolve()) != folder:
            raise UserError(
                f"{folder} was replaced by a link to {leads_to} while the run used it: put back what was there and start again"
            )


def _forget() -> None:
    """Close the lock in a forked child; otherwise the child would hold it after the parent was killed."""
    global _mine
    mine, _mine = _mine, None
    if mine is not None:
        os.close(mine.lock)


os.register_at_fork(after_in_child=_forget)


def _is_open_as(descriptor: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def _lock_beside(pulse: Path) -> Path:
    """The file that the processes of a kernel lock, and that no other user can open."""
    return pulse.with_name(f"{pulse.name}.lock")


def _content(path: Path) -> bytes | None:
    with suppress(OSError):
        return path.read_bytes()
    return None
