"""SIGUSR1: end after the running step and leave a checkpoint. slurm/ppo_hetjob.sh sends it before the time limit."""

import atexit
import signal

PREEMPTED_EXIT = 75
"""Exit code of a run that was told to end early: started again, it goes on (EX_TEMPFAIL of sysexits.h)."""

_received = False


class Preempted(Exception):
    """The run was told to end, has said so, and has nothing to do before it does."""


def hold_stop_signal() -> None:
    """From now on SIGUSR1 interrupts nothing; :func:`stop_requested` tells of it.

    Blocked as well as handled: whoever signals the whole process group must not end our child processes, which inherit
    the mask but no handler. A thread older than this call (OpenBLAS has some) does not block it and runs the handler.
    """
    signal.signal(signal.SIGUSR1, request_stop)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    # An interpreter that ends puts the default back for every handler, and a last signal would change the exit code.
    atexit.register(signal.signal, signal.SIGUSR1, signal.SIG_IGN)


def stop_requested() -> bool:
    """Whether SIGUSR1 has arrived since :func:`hold_stop_signal`, or :func:`request_stop` was called."""
    return _received or signal.SIGUSR1 in signal.sigpending()


def request_stop(*_: object) -> None:
    """End as SIGUSR1 does."""
    global _received  # no lock: a handler may come while the same thread holds it
    _received = True
