"""Decides which calls may compute, and until when."""

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from nemo_style_rlhf.wire.messages import Code, ProtocolError


class ComputeLock:
    """Admits one call at a time to the checkpoints, one to the models, and none once the server stops.

    A call that needs both takes the checkpoints first.
    """

    def __init__(self) -> None:
        self.boot_id = secrets.token_hex(8)
        """Random id of this start of the process."""
        self.shutdown_requested = threading.Event()
        """Set once a client asks the process to end."""
        self.abandoning = threading.Event()
        """Set once the running call's time is over."""
        self.model_lock = threading.Lock()
        """Held by :meth:`models`. An admitted save takes only this lock, because it continues while the server stops."""
        self.asleep = False
        """True while the models are in host memory and leave their devices to other processes."""
        self._checkpoint_lock = threading.Lock()
        self._refusing = threading.Event()
        self._busy: tuple[str, float] | None = None

    @property
    def busy(self) -> str | None:
        """As :attr:`protocol.Status.busy`."""
        busy = self._busy
        return f"{busy[0]} for {time.monotonic() - busy[1]:.1f} s" if busy else None

    def require_open(self) -> None:
        """Raise :class:`ProtocolError` STOPPING once the server is stopping."""
        if self._refusing.is_set():
            raise ProtocolError(Code.STOPPING, "the server is stopping")

    @contextmanager
    def checkpoints(self) -> Iterator[None]:
        """Hold the checkpoints; refused once the server is stopping."""
        self.require_open()
        with self._checkpoint_lock:
            yield

    @contextmanager
    def models(self, what: str, *, also_asleep: bool = False) -> Iterator[None]:
        """Hold the models for a call that ``what`` describes; refused once the server is stopping, or after a fault.

        Args:
            also_asleep: admit the call while the models sleep, because it does not use the devices or wakes the models.

        Raises:
            ProtocolError: STOPPING; or CONFLICT: the models are asleep.
        """
        self.require_open()
        with self.model_lock:
            self.require_open()
            if self.asleep and not also_asleep:
                raise ProtocolError(
                    Code.CONFLICT,
                    f"the critic sleeps while another part of its run has the device, so that {what} is not possible: its run "
                    "wakes it (critic_wake), and so does a new lease (critic_acquire)",
                )
            self._busy = what, time.monotonic()
            try:
                yield
            except Exception as error:
                if not isinstance(error, ProtocolError) or error.fatal:
                    self._refusing.set()  # what waits must not compute with models that are half way through a step
                raise
            finally:
                self._busy = None

    def close(self, grace_s: float) -> bool:
        """Refuse new work and wait for the running call. Return False if it had to be abandoned after ``grace_s`` seconds."""
        self._refusing.set()
        deadline = time.monotonic() + grace_s
        locks = self._checkpoint_lock, self.model_lock
        finished = all([lock.acquire(timeout=max(0.0, deadline - time.monotonic())) for lock in locks])
        self.abandoning.set()
        return finished
