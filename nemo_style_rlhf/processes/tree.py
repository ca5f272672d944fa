"""The supervisor of one program, run by its path: ``python tree.py LINK [tidies]``. child.py starts it and explains the protocol.

It is the subreaper of the program's descendants: when their own parent dies, they become its children, whatever their session,
and it kills those that are left. It imports only modules of the standard library that start fast.
"""

import ctypes
import errno
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
LOOK_S = 0.5
"""Seconds between two checks for the parent: a process that the parent forked may hold the link open."""
NEWS_S = 1.0
"""Seconds to wait for the end of a parent that ends together with the program."""
TIDY_S = 5.0
"""Seconds that supervisors below this one have to end their programs and run their ``afterwards``."""
TIDIES = "tidies"
"""The last argument of such a supervisor."""
KILL_S = 5.0
"""Seconds to wait for the end of killed processes. One that hangs in the kernel does not end."""
IGNORED = (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD)
"""Signals that this process ignores or catches, or that background jobs of a shell ignore. The program must not ignore them."""


class ProcessTree:
    def __init__(self, link: int) -> None:
        # A batch system sends its signals to all processes of a job. Signals for the program come over the link.
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._link = link
        parent, grace_s, linger_s, length, *rest = self._read(int.from_bytes(self._read(4), "big")).split(b"\0")
        self._parent, self._grace_s, self._linger_s = int(parent), float(grace_s), float(linger_s)
        self._afterwards, self._command = rest[: int(length)], rest[int(length) :]
        self._status: int | None = None
        """The program's wait status."""
        self._orphaned = self._ordered = False
        """True once the parent has gone, and once it has ordered the end."""
        self._deadline = float("inf")
        """``time.monotonic()`` at which all that is left is killed."""

    def run(self) -> None:
        """Start the program, wait until nothing is left of it, and end as it did."""
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._program = self._start()
        ended = self._wake_up_for_children()
        self._poll = select.poll()
        for each in (ended, self._link):
            self._poll.register(each, select.POLLIN)
        while self._reap() and time.monotonic() < self._deadline:
            self._wait(min(LOOK_S, self._deadline - time.monotonic()), ended)
        self._kill_all()
        if self._afterwards:
            news = time.monotonic() + NEWS_S
            while not (self._orphaned or self._ordered) and (left := news - time.monotonic()) > 0:
                self._wait(left, ended)
            if self._orphaned:
                try:
                    follows = os.posix_spawnp(
                        self._afterwards[0], self._afterwards, os.environ
                    )  # with all signals blocked
                    os.waitpid(follows, 0)
                except OSError:  # the command does not exist
                    pass
        _end_like(-signal.SIGKILL if self._status is None else os.waitstatus_to_exitcode(self._status))

    def _read(self, size: int) -> bytes:
        content = b""
        while len(content) < size:
            if not (more := os.read(self._link, size - len(content))):
                os._exit(1)  # the parent has gone
            content += more
        return content

    def _start(self) -> int:
        """Start the program and return its process id. Send the parent the id, or the negative number of an error."""
        reads, writes = os.pipe()
        supervisor = os.getpid()
        if (program := os.fork()) == 0:
            try:
                os.close(self._link)
                os.setsid()
                _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() == supervisor:
                    for number in IGNORED:
                        signal.signal(number, signal.SIG_DFL)
                    signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
                    os.execvp(self._command[0], self._command)
            except Exception as error:  # noqa: BLE001 told to the parent
                os.write(writes, (getattr(error, "errno", None) or errno.EINVAL).to_bytes(4, "big"))
            finally:
                os._exit(127)
        os.close(writes)
        failure = int.from_bytes(os.read(reads, 4), "big")
        self._close_all_but_link()
        try:  # noqa: SIM105 contextlib takes longer to import than this program
            os.write(self._link, (-failure or program).to_bytes(4, "big", signed=True))
        except OSError:  # the parent has gone; _wait notices it
            pass
        if failure:
            os._exit(127)
        return program

    def _close_all_but_link(self) -> None:
        """Close what the program has open: a reader of its output waits until every process that holds it has ended."""
        nothing = os.open(os.devnull, os.O_RDWR)
        for each in (0, 1, 2):
            os.dup2(nothing, each)
        for each in map(int, os.listdir("/proc/self/fd")):
            if each > 2 and each != self._link:
                try:  # noqa: SIM105
                    os.close(each)
                except OSError:  # the descriptor of the listing itself
                    pass

    @staticmethod
    def _wake_up_for_children() -> int:
        """A descriptor that becomes readable when a child ends."""
        ended, told = os.pipe()
        os.set_blocking(ended, False)
        os.set_blocking(told, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        return ended

    def _wait(self, seconds: float, ended: int) -> None:
        """Wait until a child has ended, the parent has gone, or the parent has given an order. Execute the order."""
        ready = {descriptor for descriptor, _ in self._poll.poll(1000 * max(seconds, 0))}
        if ended in ready:
            os.read(ended, 4096)
        numbers = b""
        if self._link in ready:
            try:
                numbers = os.read(self._link, 64)
            except ConnectionResetError:  # the parent has gone without having read its answer
                numbers = b""
        if not self._orphaned and ((self._link in ready and not numbers) or os.getppid() != self._parent):
            self._orphaned, numbers = True, bytes([signal.SIGTERM])
            self._deadline = min(self._deadline, time.monotonic() + self._grace_s)
            self._poll.unregister(self._link)
        for number in numbers:
            self._ordered = not self._orphaned
            if number == signal.SIGKILL or self._status is not None:  # do not wait for what the program has left
                self._deadline = 0.0
            else:
                _kill(self._program, number)

    def _reap(self) -> bool:
        """Note the end of children, and return True if others are left."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._program and self._status is None:
                    self._status = ended[1]
                    self._deadline = min(self._deadline, time.monotonic() + self._linger_s)
        except ChildProcessError:
            return False
        return True

    def _kill_all(self) -> None:
        """Kill and await all children. Children of a killed process become ours, and are killed in turn."""
        began = time.monotonic()
        killed: list[int] = []
        tidying: set[int] = set()
        while self._reap() and (passed := time.monotonic() - began) < KILL_S + TIDY_S:
            found = _children()
            if passed < TIDY_S:
                tidying |= {child for child in found if _tidies(child)}
                found = [child for child in found if child not in tidying]
            for child in found:
                _kill(child, signal.SIGKILL)
            if found == killed:
                time.sleep(0.001)
            killed = found


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as listed:
            return list(map(int, listed.read().split()))
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return [each for each in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent_of(each) == os.getpid()]


def _parent_of(process: int) -> int:
    try:
        with open(f"/proc/{process}/stat") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _tidies(process: int) -> bool:
    """True if the process is a supervisor that will run a command once its parent has gone."""
    try:
        with open(f"/proc/{process}/cmdline", "rb") as words:
            return words.read().endswith(f"\0{TIDIES}\0".encode())
    except OSError:
        return False


def _kill(process: int, number: int) -> None:
    try:  # noqa: SIM105
        os.kill(process, number)
    except OSError:  # it has ended, or is another user's
        pass


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_like(code: int) -> None:
    """End with an exit code, or by a signal if it is negative."""
    if code < 0:
        _prctl(PR_SET_DUMPABLE, 0)  # the program has dumped its own core
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    ProcessTree(int(sys.argv[1])).run()
