"""Handles SIGUSR1: end after the running step, with a checkpoint. The batch scripts send it before the time limit."""

import atexit
import signal

PREEMPTED_EXIT = 75
"""Exit code of a run that was told to end early and resumes when started again (EX_TEMPFAIL of sysexits.h)."""

_received = False


class Preempted(Exception):
    """The run was told to end, has logged that, and can end at once."""


def hold_stop_signal() -> None:
    """From now on, SIGUSR1 interrupts nothing; :func:`stop_requested` reports it.

    The signal is blocked as well as handled: a signal to the whole process group must not end our child processes, which
    inherit the mask but no handler. A thread older than this call (OpenBLAS has some) does not block it and runs the handler.
    """
    signal.signal(signal.SIGUSR1, request_stop)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    # An ending interpreter restores every default handler, so that a late signal would change the exit code.
    atexit.register(signal.signal, signal.SIGUSR1, signal.SIG_IGN)


def heed_sigterm() -> None:
    """From now on, the first SIGTERM asks for what SIGUSR1 does; the second one ends the process."""

    def first(*_: object) -> None:
        request_stop()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, first)


def stop_requested() -> bool:
    """True if SIGUSR1 has arrived since :func:`hold_stop_signal`, or :func:`request_stop` was called."""
    return _received or signal.SIGUSR1 in signal.sigpending()


def request_stop(*_: object) -> None:
    """End as SIGUSR1 does."""
    global _received  # no lock: the handler may run while the same thread holds it
    _received = True
