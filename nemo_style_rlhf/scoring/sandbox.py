"""Runs untrusted programs with bubblewrap: they see Python and an empty folder, and nothing else of the machine.

Each program has its own user, process, network, IPC and mount namespaces. It sees the system's programs and libraries and this
Python, all read-only, and a private, small, initially empty /tmp: no /proc, no home, no files of a run, no shared memory, no
network. A seccomp filter forbids starting processes, and memory, CPU time, files and wall time are bounded.
"""

import errno
import functools
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.processes.child import ChildProcess
from nemo_style_rlhf.processes.confine import refusing

LOGGER = logging.getLogger(__name__)
WITHOUT = "NSR_CODE_WITHOUT_SANDBOX"
"""Set this variable to 1 in the environment of a machine on which code may do anything."""
SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
CLONE_THREAD = 0x10000
REFUSED = {
    "x86_64": {"fork": 57, "vfork": 58, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kill": 62}
    | {"socket": 41, "shmget": 29, "semget": 64, "msgget": 68, "unshare": 272, "setns": 308, "mount": 165, "bpf": 321}
    | {
        "userfaultfd": 323,
        "perf_event_open": 298,
        "io_uring_setup": 425,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
    },
    "aarch64": {"ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kill": 129, "socket": 198}
    | {
        "shmget": 194,
        "semget": 190,
        "msgget": 186,
        "unshare": 97,
        "setns": 268,
        "mount": 40,
        "bpf": 280,
        "userfaultfd": 282,
    }
    | {"perf_event_open": 241, "io_uring_setup": 425, "add_key": 217, "request_key": 218, "keyctl": 219},
}
"""System calls that fail with EPERM: they start, watch or signal processes, keep memory that no limit counts, open sockets, or
have opened ways out of sandboxes before."""
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435
"""The flags of clone3 are in memory, where no filter sees them. It fails with ENOSYS, so that libraries use clone instead."""


@dataclass(frozen=True)
class SandboxLimits:
    memory_bytes: int = 1 << 30
    """Address space of a process."""
    cpu_s: int = 5
    file_bytes: int = 1 << 20
    folder_bytes: int = 64 << 20
    """Total size of the files in /tmp; they are in memory."""
    open_files: int = 64

    @property
    def command(self) -> list[str]:
        kinds = {
            "as": self.memory_bytes,
            "cpu": self.cpu_s,
            "fsize": self.file_bytes,
            "nofile": self.open_files,
            "core": 0,
        }
        return ["prlimit", *(f"--{kind}={most}" for kind, most in kinds.items())]


@functools.cache
def require_sandbox() -> bool:
    """Try a sandbox once. Returns False if none works and the environment says that none is needed.

    Raises:
        UserError: this machine cannot run a sandbox.
    """
    if (why := why_no_sandbox()) is None:
        return True
    if os.environ.get(WITHOUT) != "1":
        raise UserError(
            f"code cannot be run in a sandbox on this machine: {why}; install bubblewrap and allow user namespaces, or set "
            f"{WITHOUT}=1 if this machine holds nothing that the code of a response must not read, change or delete"
        )
    LOGGER.warning(
        "%s=1: the code of responses runs without a sandbox and can read, change and delete what this user can (%s)",
        WITHOUT,
        why,
    )
    return False


def why_no_sandbox() -> str | None:
    """The reason why this machine cannot run a sandbox; None if one has just been started."""
    if missing := [program for program in ("bwrap", "prlimit") if shutil.which(program) is None]:
        return f"{missing[0]} is not installed"
    if platform.machine() not in CLONE:
        return f"no filter of system calls is known for {platform.machine()}"
    with _started(True, [sys.executable, "-I", "-c", ""], SandboxLimits(), stderr=subprocess.PIPE) as process:
        _, said = process.communicate(None, 60.0)
    return (
        f"bwrap failed with {' '.join(said.decode(errors='replace').split())[-300:]!r}" if process.returncode else None
    )


@contextmanager
def confined(
    command: Sequence[str],
    limits: SandboxLimits = SandboxLimits(),
    *,
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    stdout: int | IO[bytes] = subprocess.DEVNULL,
    pass_fds: Sequence[int] = (),
    readable: Sequence[str] = (),
) -> Iterator["subprocess.Popen[bytes] | ChildProcess"]:
    """Run ``command`` in a sandbox, and kill it when the context ends. Its output and exit code are untrusted.

    Args:
        readable: files and folders that it may read, besides Python and the system's programs.
        pass_fds: open files that it keeps; it can do everything with them that they allow.

    Raises:
        UserError: this machine cannot run a sandbox, see :func:`require_sandbox`.
    """
    with _started(require_sandbox(), command, limits, stdin, stdout, pass_fds=pass_fds, readable=readable) as process:
        yield process


@contextmanager
def _started(
    inside: bool,
    command: Sequence[str],
    limits: SandboxLimits,
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    stdout: int | IO[bytes] = subprocess.DEVNULL,
    stderr: int = subprocess.DEVNULL,
    pass_fds: Sequence[int] = (),
    readable: Sequence[str] = (),
) -> Iterator["subprocess.Popen[bytes] | ChildProcess"]:
    with ExitStack() as stack:
        words, kept, folder = limits.command, list(pass_fds), "/tmp"
        if inside:
            rules = stack.enter_context(tempfile.TemporaryFile())
            rules.write(_filter())
            rules.seek(0)
            kept.append(rules.fileno())
            words += _bubblewrap(limits, readable, rules.fileno())
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        start: Any = partial(subprocess.Popen, start_new_session=True) if inside else ChildProcess
        process = start(
            [*words, *command],
            cwd="/" if inside else folder,
            # The environment of a trainer or of a user's shell may hold tokens.
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8"},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=kept,
        )
        try:
            yield process
        finally:
            if inside:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # the namespace ends with bwrap
                process.wait()
            else:
                process.kill()


def _bubblewrap(limits: SandboxLimits, readable: Sequence[str], filter_fd: int) -> list[str]:
    python = sorted({sys.base_prefix, sys.prefix})  # a folder before its subfolders
    show = [word for path in SYSTEM for word in ("--ro-bind-try", path, path)]
    show += [word for path in (*python, *readable) for word in ("--ro-bind", path, path)]
    return [
        "bwrap", "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL",
        "--disable-userns", "--die-with-parent", "--hostname", "sandbox", "--seccomp", str(filter_fd),
        "--size", str(limits.folder_bytes), "--tmpfs", "/tmp", *show,
        "--dev", "/dev", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--",
    ]  # fmt: skip


def _filter() -> bytes:
    machine = platform.machine()
    return refusing(
        machine,
        dict.fromkeys(REFUSED[machine].values(), errno.EPERM) | {CLONE3: errno.ENOSYS},
        without_flag=(CLONE[machine], CLONE_THREAD),
    )
