"""A server's files and shared memory on its host, and a lock that shows the next server whether their owner lives.

The names of its segments in /dev/shm and of its folder for sockets begin with the server's name. A file of that name in /dev/shm,
the mark, holds the folder's path and is locked while the server lives: the kernel releases the lock when its process ends, in any
way. A process id would not do: it may belong to another process later, and containers may share /dev/shm but not process ids.

    python -m nemo_style_rlhf.critic_service.runtime_files NAME    # remove the files of a server that has ended
"""

import fcntl
import os
import secrets
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.wire.short_paths import parent_of_sockets

SHARED_MEMORY = Path("/dev/shm")
NEEDED_MIB = 11
"""MiB of shared memory that Triton needs to start: it takes 4 MiB for each of three endpoints. The limit is not higher: if others
have filled the rest, a restarted server finds the memory that the last one had."""


class RuntimeFiles:
    """The runtime files of this process, a living server."""

    def __init__(self) -> None:
        """Create the folder and the mark. Raise :class:`UserError` if the shared memory cannot be written."""
        self.name = f"nsr{os.getpid()}-{secrets.token_hex(4)}"
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.name}-", dir=parent_of_sockets()))  # of mode 0700
        unlocked = ""
        try:
            self._lock, unlocked = tempfile.mkstemp(prefix="nsr-", dir=SHARED_MEMORY)
            os.write(self._lock, str(self.folder).encode())
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            os.rename(unlocked, _mark(self.name))  # the mark appears only once it is locked
        except OSError as error:
            shutil.rmtree(self.folder)
            if unlocked:
                Path(unlocked).unlink(missing_ok=True)
            raise UserError(
                f"{SHARED_MEMORY} cannot be written ({error.strerror}), where a server marks that it lives: make it writable, or "
                "remove what fills it"
            ) from error

    def remove(self) -> None:
        """Remove all of them, and kill the processes that still use them."""
        _kill_users(self.name)
        remove(self.name)
        os.close(self._lock)


def require_room() -> None:
    """Raise :class:`UserError` if Triton could not start with the free shared memory."""
    free = shutil.disk_usage(SHARED_MEMORY).free / 2**20
    if free < NEEDED_MIB:
        raise UserError(
            f"{SHARED_MEMORY} has {free:.3g} MiB free and Triton needs {NEEDED_MIB} to start: remove what lies there, or give a "
            "container more, docker run --ipc=host or --shm-size=1g"
        )


def remove(name: str) -> None:
    """Remove the segments, the folder and the mark of the server ``name``."""
    with suppress(OSError):  # gone already
        folder = Path(_mark(name).read_text())
        if folder.name.startswith(name):
            shutil.rmtree(folder, ignore_errors=True)
    for path in [*SHARED_MEMORY.glob(f"{name}-*"), _mark(name)]:
        path.unlink(missing_ok=True)


def remove_those_of_dead_servers() -> None:
    """Free the 50 MB of each dead server of this user, and kill its processes that hang."""
    for mark in SHARED_MEMORY.glob("nsr*.lock"):
        with suppress(OSError):  # another user's, already gone, or locked, as its server lives
            descriptor = os.open(mark, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_uid == os.getuid():
                    _kill_users(mark.stem)
                    remove(mark.stem)
            finally:
                os.close(descriptor)


def _kill_users(name: str) -> None:
    """SIGKILL every other process that has mapped a file of the server ``name``, program or segment."""
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):  # already gone, or another user's
            if pid != os.getpid() and name in Path(f"/proc/{pid}/maps").read_text():
                os.kill(pid, signal.SIGKILL)


def _mark(name: str) -> Path:
    return SHARED_MEMORY / f"{name}.lock"


if __name__ == "__main__":
    remove(sys.argv[1])
