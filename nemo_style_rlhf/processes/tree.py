"""The supervisor of one program, run by its path: ``python tree.py LINK``. child.py starts it and explains the protocol.

It is the subreaper of the program's descendants: those whose own parent dies become its children, whatever session they are in,
and it kills what is left. It imports only what starts fast, of the standard library.
"""

import ctypes
import os
import resource
import select
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LOOK_S = 0.5
"""Seconds between two looks for the parent: a process that the parent forked may hold the link open."""
NEWS_S = 1.0
"""Seconds to wait for the end of a parent that ends together with the program."""


def main() -> None:
    # A batch system sends its signals to all processes of a job. Those that are meant for the program come over the link.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    link = int(sys.argv[1])
    parent, grace_s, linger_s, length, *rest = _read(link, int.from_bytes(_read(link, 4), "big")).split(b"\0")
    afterwards, command = rest[: int(length)], rest[int(length) :]
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    program = _start(command, link)
    status, orphaned = _until_its_end(program, link, int(parent), float(grace_s), float(linger_s))
    if afterwards and (orphaned or select.select([link], [], [], NEWS_S)[0]):
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execv(afterwards[0], afterwards)
    _end_like(os.waitstatus_to_exitcode(status))


def _read(link: int, size: int) -> bytes:
    content = b""
    while len(content) < size:
        if not (more := os.read(link, size - len(content))):
            os._exit(1)  # the parent has gone
        content += more
    return content


def _start(command: list[bytes], link: int) -> int:
    """Start the program; returns its process id. The parent is told it, or else the negative number of an error."""
    reads, writes = os.pipe()
    supervisor = os.getpid()
    if (program := os.fork()) == 0:
        try:
            os.close(link)
            os.setsid()
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == supervisor:
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # jobs in the background of a shell ignore it
                signal.pthread_sigmask(signal.SIG_SETMASK, ())
                os.execvp(command[0], command)
        except OSError as error:
            os.write(writes, (error.errno or 1).to_bytes(4, "big"))
        finally:
            os._exit(127)
    # What the program has open is its own: who reads its output waits until all that hold it have ended.
    nothing = os.open(os.devnull, os.O_RDWR)
    for each in (0, 1, 2):
        os.dup2(nothing, each)
    os.close(writes)
    failure = int.from_bytes(os.read(reads, 4), "big")
    os.closerange(3, link)
    os.closerange(link + 1, 2**20)
    try:  # noqa: SIM105 contextlib takes longer to import than this program
        os.write(link, (-failure or program).to_bytes(4, "big", signed=True))
    except OSError:  # the parent has gone, which is noticed soon
        pass
    if failure:
        os._exit(127)
    return program


def _until_its_end(program: int, link: int, parent: int, grace_s: float, linger_s: float) -> tuple[int, bool]:
    """Wait until nothing is left of the program; returns its wait status, and whether the parent has gone."""
    wakes, told = os.pipe()
    os.set_blocking(wakes, False)
    os.set_blocking(told, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    statuses: dict[int, int] = {}
    orphaned, deadline = False, float("inf")
    while _reap(statuses):
        if program in statuses:
            deadline = min(deadline, time.monotonic() + linger_s)
        if time.monotonic() >= deadline:
            _kill_all(statuses)
            break
        rest = min(LOOK_S, deadline - time.monotonic())
        ready, _, _ = select.select([wakes] if orphaned else [wakes, link], [], [], max(rest, 0))
        if wakes in ready:
            os.read(wakes, 4096)
        numbers = os.read(link, 64) if link in ready else b""
        if not orphaned and ((link in ready and not numbers) or os.getppid() != parent):
            orphaned, numbers = True, bytes([signal.SIGTERM])
            deadline = min(deadline, time.monotonic() + grace_s)
        for number in numbers:
            if number == signal.SIGKILL:
                deadline = 0.0
            elif program not in statuses:
                os.kill(program, number)
    return statuses[program], orphaned


def _reap(statuses: dict[int, int]) -> bool:
    """Note the wait statuses of children that have ended; returns whether others are left."""
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[ended[0]] = ended[1]
    except ChildProcessError:
        return False
    return True


def _kill_all(statuses: dict[int, int]) -> None:
    """Kill and await all children. Those of a killed one become ours, and are killed in turn."""
    while _reap(statuses):
        for child in _children():
            try:  # noqa: SIM105
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                pass
        ended, status = os.waitpid(-1, 0)
        statuses[ended] = status


def _children() -> list[int]:
    """Process ids of this process's children."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat", "rb") as stat:
                if int(stat.read().rpartition(b")")[2].split()[1]) == os.getpid():
                    found.append(int(pid))
        except OSError:  # it has ended
            pass
    return found


def _end_like(code: int) -> None:
    """End with an exit code, or by the signal of a negative one."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has dumped its own
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
