"""What a server has on its host outside its own memory, and how the next one tells whether its owner lives.

Its segments in /dev/shm and its folder for sockets begin with the server's name. A file of that name in /dev/shm, the mark, holds
the folder's path and is locked while the server lives: the kernel lets go of the lock with the process, however that ends. A
process id alone would not do: another process may have it by now, and containers may share /dev/shm but not their process ids.

Needs the standard library only: the guardian, which imports it, is there in a moment.
"""

import fcntl
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
ROUNDS = 100


class Belongings:
    """Those of a living server, which is this process."""

    def __init__(self) -> None:
        self.name = f"nsr{os.getpid()}-{secrets.token_hex(4)}"
        # 0700; and short, because socket paths end at 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.name}-"))
        self._lock, unlocked = tempfile.mkstemp(prefix="nsr-", dir=SHARED_MEMORY)
        os.write(self._lock, str(self.folder).encode())
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(unlocked, _mark(self.name))  # nobody sees it without its lock

    def remove(self) -> None:
        """All of it, and end the processes that still use it."""
        _kill_users(self.name)
        remove(self.name)
        os.close(self._lock)


def remove(name: str) -> None:
    """Remove the segments, the folder and the mark of the server ``name``."""
    with suppress(OSError):  # gone already
        folder = Path(_mark(name).read_text())
        if folder.name.startswith(name):
            shutil.rmtree(folder, ignore_errors=True)
    for path in [*SHARED_MEMORY.glob(f"{name}-*"), _mark(name)]:
        path.unlink(missing_ok=True)


def remove_those_of_dead_servers() -> None:
    """As far as they are this user's; 50 MB each, and processes that hang."""
    for mark in SHARED_MEMORY.glob("nsr*.lock"):
        with suppress(OSError):  # another user's, gone by now, or locked: its server lives
            descriptor = os.open(mark, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_uid == os.getuid():
                    _kill_users(mark.stem)
                    remove(mark.stem)
            finally:
                os.close(descriptor)


def kill_session() -> None:
    """SIGKILL every other process of the session that this process leads; it ends those, too, that are stopped or hang."""
    for _ in range(ROUNDS):  # one may have forked meanwhile
        if not _kill(lambda pid: os.getsid(pid) == os.getpid() and not _is_zombie(pid)):
            return
        time.sleep(0.05)


def _kill_users(name: str) -> None:
    """SIGKILL every other process that has a file of the server ``name`` in its memory, be it a program or a segment."""
    _kill(lambda pid: name in Path(f"/proc/{pid}/maps").read_text())


def _kill(which: Callable[[int], bool]) -> int:
    """How many there were."""
    found = 0
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):  # gone by now, or another user's
            if pid != os.getpid() and which(pid):
                os.kill(pid, signal.SIGKILL)
                found += 1
    return found


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def _mark(name: str) -> Path:
    return SHARED_MEMORY / f"{name}.lock"
