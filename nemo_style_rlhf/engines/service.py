"""The work of an engine process: one thread owns the generator; calls hand it jobs and wait for their results."""

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nemo_style_rlhf.engine.memory_use import held_bytes
from nemo_style_rlhf.engines import messages
from nemo_style_rlhf.engines.groups import BACKENDS, NAME, Groups
from nemo_style_rlhf.engines.messages import EngineStatus
from nemo_style_rlhf.generation.in_process import InProcessGenerator, InProcessStream
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, TransferError
from nemo_style_rlhf.generation.self_check import loses_bits
from nemo_style_rlhf.generation.weight_store import PublishedWeights, SentWeights, WholeVersion
from nemo_style_rlhf.wire.messages import REQUEST, RESPONSE, Array, Code, ProtocolError, json_tensor
from nemo_style_rlhf.wire.reading import read

LOGGER = logging.getLogger(__name__)
MEMBERS = 1024
"""Upper bound on the size of a group: more engines than a trainer has."""
WIDEST = 8
"""Bytes of the widest number."""
HEAD_BYTES = 1024
"""Maximum number of bytes with which a file of weights names a tensor."""
MANIFEST_BYTES = 2**26
IDLE_S = 0.5
"""Seconds after which an idle engine checks whether it should end."""


WAIT_S = 5.0
"""Seconds after which a call of ``engine_generate`` is told to ask again: no answer times out, and a shutdown waits no longer."""
LEFT_S = 60.0
"""Seconds after which a call is dropped that no client asks for again."""


@dataclass
class _PendingCall:
    """A call of ``engine_generate``: under way, or done and not fetched yet."""

    stream: InProcessStream
    requests: list[GenerationRequest]
    done: "Future[list[Completion]]" = field(default_factory=Future)
    asked: float = field(default_factory=time.monotonic)
    """Time at which a client last asked for it."""
    completions: dict[int, Completion] = field(default_factory=dict)


class EngineService:
    """Samples for one lease at a time. A sample depends only on its request and the weights, so a repeated call gets the same
    answer from this engine or another."""

    def __init__(
        self, generator: InProcessGenerator, *, boot_id: str, max_sequence_length: int, vocabulary: int, max_request_bytes: int,
        folder: Path | None = None, thorough: bool = False,
    ) -> None:  # fmt: skip
        """Serve samples of ``generator``.

        Args:
            vocabulary: number of the model's token ids; a larger id in a prompt would break the generator.
            folder: place where groups that send weights meet; None if the engine joins none.
            thorough: True if samples must keep their bits; long ones are then checked, too.
        """
        self.shutdown_requested = threading.Event()
        self.failed = threading.Event()
        """The generator is unusable: weights did not reach it whole, or one of its steps failed."""
        self._generator, self._boot_id, self._max_length = generator, boot_id, max_sequence_length
        self._vocabulary, self._max_request_bytes = vocabulary, max_request_bytes
        # No SimpleQueue: its get waits forever if a signal comes after the timeout, as when a process was stopped (CPython 3.11).
        self._jobs: queue.Queue[tuple[Callable[[], Any], Future[Any]]] = queue.Queue()
        self._ended = threading.Event()
        self._calls: dict[str, _PendingCall] = {}
        """By digest: a repeat joins the call under way."""
        self._lease: str | None = None
        self._groups = None if folder is None else Groups(folder)
        self._receiving = threading.Lock()
        self._sent: dict[str, bytearray] = {}
        """Files of the next weights, by name, from a trainer whose folder this process does not see."""
        self._room = 0
        """Maximum number of bytes of these files."""
        self._held: WholeVersion | None = None
        self._gap = 0.0
        """The gap on the probe of the current weights."""
        self._thorough = max_sequence_length if thorough else 0
        self._loses_bits: str | None = None

    def handle(self, endpoint: str, inputs: dict[str, Array]) -> dict[str, Array]:
        """Answer a call; it may wait in any thread but the one of :meth:`run`."""
        if endpoint == messages.GENERATE.name:
            return messages.generate_outputs(self._generate(inputs))
        act = {
            messages.STATUS.name: self._status,
            messages.ACQUIRE.name: self._acquire,
            messages.SEND.name: self._send,
            messages.RECEIVE.name: self._receive,
            messages.LOAD.name: self._load,
            messages.SLEEP.name: self._sleep,
            messages.SHUTDOWN.name: self._shutdown,
        }[endpoint]
        return {RESPONSE.name: json_tensor(act(inputs))}

    def run(self, ends: Callable[[], bool]) -> None:
        """Own the generator until ``ends``. A call that is under way then gets STOPPING."""
        while not ends() and not self.failed.is_set():
            try:
                while True:
                    _do(*self._jobs.get(block=not self._generator.running, timeout=IDLE_S))
            except queue.Empty:
                pass
            self._forget()
            if self._generator.running and self._stepped():
                self._settle()
        self._ended.set()
        self._refuse_jobs()
        self._drop(ProtocolError(Code.STOPPING, "the engine is stopping"))

    # --- in the threads of calls --------------------------------------------------------------------------------------

    def _in_turn(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` in the generator's thread, between two of its steps."""
        result: Future[Any] = Future()
        self._jobs.put((work, result))
        if self._ended.is_set():
            self._refuse_jobs()
        return result.result()

    def _refuse_jobs(self) -> None:
        """Refuse all waiting jobs: the thread that does them has ended."""
        with contextlib.suppress(queue.Empty):
            while True:
                _, result = self._jobs.get_nowait()
                result.set_exception(ProtocolError(Code.STOPPING, "the engine is stopping"))

    def _generate(self, inputs: dict[str, Array]) -> list[Completion]:
        requests, lease, version = messages.parse_generate(inputs)
        for request in requests:
            if (length := len(request.prompt) + request.max_tokens) > self._max_length:
                raise ProtocolError(
                    Code.INVALID, f"a sequence may reach {length} tokens, this engine takes at most {self._max_length}"
                )
            if (largest := max(request.prompt)) >= self._vocabulary:
                raise ProtocolError(
                    Code.INVALID, f"token id {largest} is not in the model's vocabulary of {self._vocabulary}"
                )
        name = messages.digest(inputs)

        def begin() -> _PendingCall:
            self._require(lease)
            if self._held is None or self._held.version != version:
                held = "none" if self._held is None else self._held.version
                raise ProtocolError(
                    Code.WRONG_STEP, f"weights version {version!s:.20} is wanted, the engine holds {held}"
                )
            if (known := self._calls.get(name)) is not None:
                known.asked = time.monotonic()
                return known
            stream = self._generator.stream(version)
            try:
                stream.submit(requests)
            except (ValueError, TypeError) as error:  # vLLM checks token ids and settings: no reason to end
                stream.close()
                raise ProtocolError(Code.INVALID, f"the generator refuses a request: {error!s:.300}") from error
            return self._calls.setdefault(name, _PendingCall(stream, requests))

        call: _PendingCall = self._in_turn(begin)
        try:
            completions = call.done.result(WAIT_S)
        except (TimeoutError, FutureTimeout) as error:
            call.asked = time.monotonic()
            raise ProtocolError(Code.PENDING, f"{len(requests)} samples are on their way: ask again") from error
        self._calls.pop(name, None)
        return completions

    def _status(self, _: dict[str, Array]) -> dict[str, Any]:
        held = self._held
        version, digest = (None, None) if held is None else (held.version, held.digest)
        return asdict(
            EngineStatus(
                messages.PROTOCOL_VERSION, self._boot_id, self._lease, version, digest, self._generator.running,
                self._generator.steps, self._generator.cache_share, self._max_length, self._max_request_bytes,
                repeatable=bool(self._thorough),
            )
        )  # fmt: skip

    def _acquire(self, inputs: dict[str, Array]) -> dict[str, Any]:
        request = read(inputs[REQUEST.name], messages.EngineAcquireRequest)

        def acquire() -> None:
            if request.lease != self._lease:
                self._drop(ProtocolError(Code.LEASE_LOST, "another trainer has acquired the engine"))
                self._lease, self._held = request.lease, None
                self._sent.clear()
                sizes = map(math.prod, request.shapes.values())
                self._room = MANIFEST_BYTES + sum(HEAD_BYTES + size * WIDEST for size in sizes)
                self._generator.expect({name: tuple(sizes) for name, sizes in request.shapes.items()})

        self._in_turn(acquire)
        return {}

    def _send(self, inputs: dict[str, Array]) -> dict[str, Any]:
        request = read(inputs[REQUEST.name], messages.SendRequest)
        content, offset, name = inputs[messages.CONTENT.name][0], request.offset, request.file

        def take() -> None:
            self._require(request.lease)
            there = sum(map(len, self._sent.values()))
            begun = len(self._sent.get(name, b""))
            if not 0 <= offset <= begun:
                raise ProtocolError(
                    Code.INVALID, f"{name:.40} has {begun} bytes so far, offset {offset!s:.20} is not possible"
                )
            if there - begun + max(begun, offset + len(content)) > self._room:
                raise ProtocolError(Code.INVALID, f"weights of these shapes take at most {self._room} bytes")
            self._sent.setdefault(name, bytearray())[offset : offset + len(content)] = content

        self._in_turn(take)
        return {}

    def _receive(self, inputs: dict[str, Array]) -> dict[str, Any]:
        request = read(inputs[REQUEST.name], messages.ReceiveRequest)
        if sum(size for _, size in request.files) > self._room:
            raise ProtocolError(Code.INVALID, f"weights of these shapes take at most {self._room} bytes")
        if self._groups is None or not NAME.fullmatch(request.group) or request.backend not in BACKENDS:
            raise ProtocolError(
                Code.INVALID, "the engine has no server.ready_file, or group or backend is not possible"
            )
        if not 0 < request.rank < request.size < MEMBERS:
            raise ProtocolError(Code.INVALID, f"rank and size are not possible: expected 0 < rank < size < {MEMBERS}")
        self._in_turn(lambda: self._require(request.lease))
        with self._receiving:
            try:
                group = self._groups.meet(request.group, request.rank, request.size, request.backend)
                received = {name: group.receive(size) for name, size in request.files}
            except RuntimeError as error:
                self._groups.forget()
                raise ProtocolError(Code.CONFLICT, f"the group of trainer and engines broke: {error!s:.300}") from error

        def take() -> None:
            self._require(request.lease)
            self._sent = received

        self._in_turn(take)
        return {}

    def _load(self, inputs: dict[str, Array]) -> dict[str, Any]:
        request = read(inputs[REQUEST.name], messages.LoadRequest)

        def load() -> dict[str, Any]:
            self._require(request.lease)
            if self._held is not None and self._held.digest == request.digest:  # the answer was lost, or not waited for
                return {"gap": self._gap, "loses_bits": self._loses_bits}
            if self._generator.running:
                raise ProtocolError(Code.CONFLICT, f"{self._generator.running} requests are running")
            update = self._published(Path(request.folder), request.digest)
            self._held = None
            gap = self._generator.load(update)
            if self._loses_bits is None:
                self._loses_bits = loses_bits(
                    self._generator, update.probe.sequences, update.version, thorough=self._thorough
                )
            self._held, self._gap = update, gap
            return {"gap": gap, "loses_bits": self._loses_bits}

        try:
            answer: dict[str, Any] = self._in_turn(load)
            return answer
        except TransferError as error:
            LOGGER.error("%s; the engine ends", error)
            self.failed.set()
            raise ProtocolError(Code.INTERNAL, str(error)) from error

    def _sleep(self, inputs: dict[str, Array]) -> dict[str, Any]:
        lease = read(inputs[REQUEST.name], messages.LeaseRequest).lease

        def sleep() -> dict[str, Any]:
            self._require(lease)
            if self._generator.running:
                raise ProtocolError(Code.CONFLICT, f"{self._generator.running} requests are running")
            self._held = None
            self._generator.sleep()
            return {"held_bytes": held_bytes()}

        answer: dict[str, Any] = self._in_turn(sleep)
        return answer

    def _shutdown(self, inputs: dict[str, Array]) -> dict[str, Any]:
        self._require(read(inputs[REQUEST.name], messages.LeaseRequest).lease)
        self.shutdown_requested.set()
        return {}

    # --- in the generator's thread ------------------------------------------------------------------------------------

    def _published(self, folder: Path, digest: str) -> WholeVersion:
        """The weights with ``digest``, sent or in ``folder``.

        Raises:
            ProtocolError: NOT_FOUND: neither.
        """
        if self._sent:
            files, self._sent = self._sent, {}
            if (sent := SentWeights.of(files)).digest != digest:
                raise TransferError(f"weights with digest {sent.digest:.12} were sent, {digest:.12} are to be loaded")
            return sent
        with contextlib.suppress(TransferError):
            if (stored := PublishedWeights.open(folder)).digest == digest:
                return stored
        raise ProtocolError(Code.NOT_FOUND, "this host does not have the folder of these weights: they must be sent")

    def _require(self, lease: str) -> None:
        if lease != self._lease:
            raise ProtocolError(Code.LEASE_LOST, "another trainer has acquired the engine")

    def _stepped(self) -> bool:
        """Make a step; True if it succeeded. If it failed, every call is answered, or its thread would wait forever."""
        try:
            self._generator.step()
        except Exception:
            LOGGER.exception("the generator failed; the engine ends")
            self.failed.set()
            self._drop(ProtocolError(Code.INTERNAL, "the generator failed and the engine ends; its log says why"))
        return not self.failed.is_set()

    def _settle(self) -> None:
        """Answer the calls whose samples have all finished."""
        for call in [call for call in self._calls.values() if not call.done.done()]:
            call.completions |= {each.request.sample.prompt_id: each for each in call.stream.finished()}
            if not call.stream.unfinished:
                call.done.set_result([call.completions[index] for index in range(len(call.requests))])

    def _forget(self) -> None:
        """Drop the calls that no client asks for any more."""
        for name, call in list(self._calls.items()):
            if time.monotonic() - call.asked > max(LEFT_S, 2 * WAIT_S):
                self._end(call, ProtocolError(Code.CONFLICT, "nobody asked for these samples any more"))
                self._calls.pop(name, None)

    def _drop(self, reason: ProtocolError) -> None:
        for call in list(self._calls.values()):
            self._end(call, reason)
        self._calls.clear()

    @staticmethod
    def _end(call: _PendingCall, reason: ProtocolError) -> None:
        if not call.done.done():
            call.stream.close()
            call.done.set_exception(reason)


def _do(work: Callable[[], Any], result: "Future[Any]") -> None:
    try:
        result.set_result(work())
    except Exception as error:  # noqa: BLE001 the future carries it
        result.set_exception(error)
