"""Client of one generation engine."""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from nemo_style_rlhf.engines import messages
from nemo_style_rlhf.engines.messages import EngineStatus
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest
from nemo_style_rlhf.generation.weight_store import PublishedWeights
from nemo_style_rlhf.schema.remote_critic import ClientTlsConfig, Peer
from nemo_style_rlhf.wire.connection import PLAIN_HTTP, Connection, ServerUnreachable
from nemo_style_rlhf.wire.messages import (
    BYTES_PREFIX,
    REQUEST,
    RESPONSE,
    Array,
    Code,
    Endpoint,
    ProtocolError,
    json_tensor,
)

PEER = Peer("generation engine", "servers/serve_engine.py", "generation.engines", "model.path=POLICY", "its ready file")
STATUS_TIMEOUT_S = 10.0
AT_WORK_S = 600.0
"""Timeout in seconds of one call for samples: longer than any step of an engine."""
CALLS = 64
"""Maximum number of calls of one engine at a time."""
T = TypeVar("T")
NO_TENSORS: Mapping[str, Array] = MappingProxyType({})


class EngineClient:
    """Client of one engine, safe to use from several threads. Its calls raise the errors of :meth:`Connection.call`."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str | None,
        retries: int,
        timeout_s: float,
        tls: ClientTlsConfig = PLAIN_HTTP,
    ) -> None:
        """``timeout_s`` bounds the time of one call, except ``status`` and ``generate``."""
        self._connection = Connection(host, port, token=token, retries=retries, peer=PEER, tls=tls)
        self._timeout_s = timeout_s
        self._closing = threading.Event()

    @property
    def address(self) -> str:
        return self._connection.address

    def status(self, *, retry: bool = True) -> EngineStatus:
        """The engine's status.

        Raises:
            UserError: the engine speaks another version of the protocol.
        """
        outputs = self._connection.call(messages.STATUS, {}, timeout_s=STATUS_TIMEOUT_S, retry=retry)
        answer = json.loads(outputs[RESPONSE.name][0])
        if (spoken := answer["protocol_version"]) != messages.PROTOCOL_VERSION:
            raise UserError(
                f"the engine at {self.address} speaks protocol version {spoken}, this trainer {messages.PROTOCOL_VERSION}: "
                "install the same version of nemo_style_rlhf on both sides"
            )
        return EngineStatus(**answer)

    def acquire(self, lease: str, shapes: dict[str, tuple[int, ...]]) -> None:
        """Make the engine work only for ``lease``, and bind this client to the engine's current process.

        Args:
            shapes: the tensors that every version of the weights holds.
        """
        if self._connection.boot_id is None:
            self._connection.boot_id = self.status().boot_id
        self._ask(messages.ACQUIRE, lease=lease, shapes=shapes)

    def load(self, lease: str, published: PublishedWeights) -> tuple[float, str]:
        """Make the engine load a version of a :class:`WeightStore`. If it does not see the store's folder, send the version.

        Returns:
            The gap on the probe, in nats, and what makes samples lose their bits, see :func:`self_check.loses_bits`.
        """
        load = partial(self._ask, messages.LOAD, lease=lease, folder=str(published.folder), digest=published.digest)
        try:
            answer = load()
        except ProtocolError as error:
            if error.code is not Code.NOT_FOUND:
                raise
            self._send(lease, published)
            answer = load()
        return float(answer["gap"]), str(answer["loses_bits"])

    def receive(
        self, lease: str, published: PublishedWeights, *, group: str, rank: int, size: int, backend: str
    ) -> None:
        """Make the engine meet a :class:`groups.Group` at a file next to its ready file, and receive a version from rank 0."""
        files = [[path.name, path.stat().st_size] for path in published.files]
        self._ask(messages.RECEIVE, lease=lease, group=group, rank=rank, size=size, backend=backend, files=files)

    def _send(self, lease: str, published: PublishedWeights) -> None:
        """Send the files of a version, the manifest last."""
        size = self.status().max_request_bytes - BYTES_PREFIX
        for path in published.files:
            with path.open("rb") as file:
                for offset in range(0, path.stat().st_size, size):
                    content = np.array([file.read(size)], dtype=np.object_)
                    self._ask(
                        messages.SEND, {messages.CONTENT.name: content}, lease=lease, file=path.name, offset=offset
                    )

    def generate(self, requests: Sequence[GenerationRequest], *, lease: str, version: int) -> list[Completion]:
        """Samples in the order of ``requests``. A repeated call returns the same, from this engine or another.

        There is no time limit: a working engine asks to repeat the call every few seconds. The caller checks that it advances.
        """
        inputs = messages.generate_inputs(requests, lease=lease, version=version)
        while True:
            try:
                outputs = self._connection.call(messages.GENERATE, inputs, timeout_s=AT_WORK_S)
                return messages.parse_completions(requests, outputs, version)
            except ProtocolError as error:
                if error.code is not Code.PENDING:
                    raise
                if self._closing.is_set():
                    raise ServerUnreachable(f"the connection to the engine at {self.address} was closed") from error

    def sleep(self, lease: str) -> int:
        """Make the engine free weights and cache until it loads a version; returns the bytes that it still holds."""
        return int(self._ask(messages.SLEEP, lease=lease)["held_bytes"])

    def shutdown(self, lease: str) -> None:
        self._ask(messages.SHUTDOWN, lease=lease)

    def close(self) -> None:
        self._closing.set()
        self._connection.close()

    def _ask(self, endpoint: Endpoint, tensors: Mapping[str, Array] = NO_TENSORS, **content: Any) -> dict[str, Any]:
        inputs = {**tensors, REQUEST.name: json_tensor(content)}
        outputs = self._connection.call(endpoint, inputs, timeout_s=self._timeout_s)
        answer: dict[str, Any] = json.loads(outputs[RESPONSE.name][0])
        return answer


@dataclass
class EngineProcess:
    """An engine that answers and holds the current weights."""

    name: str
    client: EngineClient
    where: dict[str, Any]
    """Content of its ready file."""
    calls: int = 0
    """Calls under way."""
    gap: float = 0.0
    """The gap that its last load found on the probe, in nats."""
    cache_share: float = 0.0
    """Largest share of its KV cache that was in use since its last load, when it last said so."""
    steps: int = 0
    """Steps that it had made when it last said so."""
    advanced: float = field(default_factory=time.monotonic)
    """Time at which it last had nothing to do, or had made more steps."""
    gone: "Future[object]" = field(default_factory=Future)
    """Is done, with the reason as its result, once the engine is given up."""
    _threads: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, CALLS, "engine"))

    def call(self, ask: Callable[[], T]) -> T:
        """The answer to a call. Another thread waits for it, since a call to an engine that hangs lasts until its timeout.

        Raises:
            ServerUnreachable: the engine was given up meanwhile. Errors of ``ask`` are raised, too.
        """
        asked = self._threads.submit(ask)
        either: list[Future[Any]] = [asked, self.gone]
        wait(either, return_when=FIRST_COMPLETED)
        if not asked.done():
            raise ServerUnreachable(str(self.gone.result()))
        return asked.result()

    def give_up(self, reason: object) -> None:
        """Fail every pending call."""
        with suppress(InvalidStateError):
            self.gone.set_result(reason)
