"""Tracks the actor that may write, and the steps and requests that are done: rules 2 and 3 of the protocol."""

import secrets
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from nemo_style_rlhf.checkpoint.names import run_of
from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.critic_service.protocol import TrainPart
from nemo_style_rlhf.critic_service.service import Handler, Tensors, response
from nemo_style_rlhf.wire import messages
from nemo_style_rlhf.wire.messages import Array, Code, ProtocolError
from nemo_style_rlhf.wire.reading import read

Answer = dict[str, Any]
Changing = TypeVar(
    "Changing", protocol.AcquireRequest, protocol.CommitRequest, protocol.RestoreRequest, protocol.TurnRequest
)
REMEMBERED = 100
"""Answers that each endpoint under :func:`once` keeps for repeated requests."""


class Ledger:
    """The lease, the count of train steps, the parts staged for the next step and the answers given for the last.

    Thread-safe. The thread that staged the last missing part applies the step, then calls :meth:`applied` or :meth:`drop`.
    """

    def __init__(self, *, max_staged_bytes: int) -> None:
        """``max_staged_bytes`` bounds the tensors of a step whose parts have not all arrived."""
        self.max_staged_bytes = max_staged_bytes
        self._lock = threading.RLock()
        self._lease: str | None = None
        self._holder: str | None = None
        self._step = 0
        self._staged: dict[int, TrainPart] = {}
        self._answered: dict[tuple[int, int], tuple[str, Answer]] = {}

    @property
    def step(self) -> int:
        return self._step

    @property
    def holder(self) -> str | None:
        return self._holder

    def acquire(self, run_id: str) -> str:
        """Return a new lease, and forget everything staged or answered under the old one."""
        with self._lock:
            self._lease, self._holder = secrets.token_hex(16), run_id
            self._forget()
            return self._lease

    def check(self, lease: str) -> None:
        """Raise LEASE_LOST unless ``lease`` is the current one."""
        with self._lock:
            if self._lease is None or not secrets.compare_digest(lease.encode(), self._lease.encode()):
                owner = (
                    f"run {self._holder!r} holds it now"
                    if self._holder
                    else "nobody acquired one since the server started"
                )
                raise ProtocolError(Code.LEASE_LOST, f"the lease is not valid: {owner}; acquire a new one to go on")

    def check_run(self, lease: str, checkpoint_id: str) -> None:
        """Like :meth:`check`; also raise CONFLICT unless the checkpoint belongs to the run that holds the lease."""
        with self._lock:
            self.check(lease)
            if (run := run_of(checkpoint_id)) != self._holder:
                raise ProtocolError(
                    Code.CONFLICT,
                    f"checkpoint {checkpoint_id} is of the run {run}, the lease of the run {self._holder}: "
                    "acquire one for that run",
                )

    def stage(self, part: TrainPart) -> tuple[Answer, list[TrainPart] | None]:
        """Stage a part. Return its answer, and all parts in order once none is missing, else None.

        A part that was answered before gets the same answer again and stages nothing.

        Raises:
            ProtocolError: LEASE_LOST, WRONG_STEP with both numbers, CONFLICT for different content under a known number, or
                INVALID for more bytes than may be staged.
        """
        with self._lock:
            self.check(part.lease)
            digest = part.digest()
            if (known := self._answered.get((part.step, part.part))) is not None:
                if known[0] != digest:
                    raise ProtocolError(
                        Code.CONFLICT, f"part {part.part} of step {part.step} was answered before with other content"
                    )
                return known[1], None
            if part.step != self._step + 1:
                raise ProtocolError(
                    Code.WRONG_STEP, f"train step {part.step} does not follow: the critic is at step {self._step}"
                )
            for other in self._staged.values():
                if other.parts != part.parts:
                    raise ProtocolError(
                        Code.CONFLICT,
                        f"step {part.step} was begun with {other.parts} parts, this one says {part.parts}",
                    )
            if (same := self._staged.get(part.part)) is not None and same.digest() != digest:
                raise ProtocolError(
                    Code.CONFLICT, f"part {part.part} of step {part.step} was staged with other content"
                )
            others = sum(other.nbytes for number, other in self._staged.items() if number != part.part)
            if (staged := others + part.nbytes) > self.max_staged_bytes:
                raise ProtocolError(
                    Code.INVALID,
                    f"step {part.step} comes to {staged} bytes with part {part.part} of {part.parts}, the server's "
                    f"server.max_staged_bytes is {self.max_staged_bytes}: start it with more, or train on less in a step",
                )
            self._staged[part.part] = part.owned()
            answer = {"staged": len(self._staged), "parts": part.parts}
            if len(self._staged) < part.parts:
                return answer, None
            return answer, [self._staged[number] for number in range(1, part.parts + 1)]

    def applied(self, parts: list[TrainPart], answer: Answer) -> None:
        """Record that the step of ``parts`` changed the weights. Repeating any of its parts returns ``answer``."""
        with self._lock:
            self._forget()
            self._step += 1
            if parts[0].lease == self._lease:  # else it was lost while the step ran, and no client may get the answer
                self._answered = {(part.step, part.part): (part.digest(), answer) for part in parts}

    def drop(self) -> None:
        """Forget the staged parts, because they do not make a valid step."""
        with self._lock:
            self._staged = {}

    def restored(self, step: int) -> None:
        """Record that the weights are now at ``step``."""
        with self._lock:
            self._forget()
            self._step = step

    def _forget(self) -> None:
        self._staged, self._answered = {}, {}


def once(message: type[Changing], change: Callable[[Changing], dict[str, Any]]) -> Handler:
    """Make an endpoint that calls ``change`` once for each request id. Its requests must come one at a time. A copy of one of the
    last ``REMEMBERED`` requests changes nothing."""
    answered: dict[str, tuple[Changing, dict[str, Any]]] = {}

    def endpoint(inputs: Mapping[str, Array]) -> Tensors:
        request = read(inputs[messages.REQUEST.name], message)
        if request.request_id is None:
            return response(change(request))
        if request.request_id not in answered:
            answered[request.request_id] = request, change(request)
            if len(answered) > REMEMBERED:
                del answered[next(iter(answered))]
        first, answer = answered[request.request_id]
        if first != request:
            raise ProtocolError(Code.CONFLICT, f"request_id {request.request_id} was used before, with other content")
        return response(answer)

    return endpoint
