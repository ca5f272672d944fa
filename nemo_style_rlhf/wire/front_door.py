"""The front door: a separate process that owns the public port, the only process that unauthenticated clients reach.

Tornado's HTTP server reads requests, within bounds on heads, bodies and time. The door compares the token before it reads a body,
writes the head of every request anew (``kserve.canonical_head``) and passes the tensors on to the backend on a Unix socket behind
it. Once the backend has a whole request, the door reads the answer to its end, whether or not the client still waits, so that the
backend never sees a client hang up. The token stays in this process.

    python -m nemo_style_rlhf.wire.front_door    # reads its FrontDoorSettings as JSON from standard input, and ends with it
"""

import asyncio
import json
import logging
import os
import signal
import socket
import ssl
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

from tornado.httputil import HTTPServerConnectionDelegate
from tornado.iostream import IOStream

from nemo_style_rlhf.launch.malloc import return_freed_memory
from nemo_style_rlhf.wire.entrance import Entrance
from nemo_style_rlhf.wire.exchange import Exchange, connect
from nemo_style_rlhf.wire.limits import JSON_BODY_BYTES, TENSOR_HEAD_BYTES
from nemo_style_rlhf.wire.messages import Endpoint, TensorSpec

REST_S = 10.0
"""Seconds that an unused connection to the backend is kept."""


@dataclass(frozen=True)
class Route:
    """An endpoint that the front door serves, and the size of its requests."""

    endpoint: Endpoint
    tensor_bytes: int
    """Maximum bytes of tensors in a request; 0 if the endpoint takes only JSON."""
    backend: str | None = None
    """Path of the Unix socket of its own backend; None means :attr:`FrontDoorSettings.backend`."""

    @property
    def largest_body(self) -> int:
        """Maximum bytes of a request's body."""
        return self.tensor_bytes + TENSOR_HEAD_BYTES if self.tensor_bytes else JSON_BODY_BYTES

    @property
    def path(self) -> str:
        return f"/v2/models/{self.endpoint.name}/infer"


@dataclass(frozen=True)
class FrontDoorSettings:
    """Settings that the server process sends to its front door."""

    listener: int
    """Descriptor of the public port's socket. Both processes have it open."""
    token: str = field(repr=False)
    backend: str
    """Path of the backend's Unix socket."""
    metrics: str | None
    """Path of the socket of the backend's metrics; None if they are not served."""
    routes: tuple[Route, ...]
    bytes_in_flight: int
    """Maximum bytes of all requests that wait for their answers; the door refuses more."""
    certificate: str | None = None
    key: str | None = None
    client_ca: str | None = None

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "FrontDoorSettings":
        content = json.loads(text)
        routes = tuple(Route(**route | {"endpoint": _endpoint(route["endpoint"])}) for route in content["routes"])
        return cls(**content | {"routes": routes})


def _endpoint(content: dict[str, Any]) -> Endpoint:
    inputs, outputs = (tuple(TensorSpec(**spec) for spec in content[side]) for side in ("inputs", "outputs"))
    return Endpoint(**content | {"inputs": inputs, "outputs": outputs, "roles": tuple(content["roles"])})


def tls_context(certificate: str, key: str | None, client_ca: str | None) -> ssl.SSLContext:
    """The server's side of TLS. With ``client_ca``, clients must show a certificate that this authority signed."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=client_ca)
    context.load_cert_chain(certificate, key)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class FrontDoor(HTTPServerConnectionDelegate):
    """Starts an :class:`Exchange` for each request."""

    def __init__(self, settings: FrontDoorSettings) -> None:
        self.settings = settings
        self.routes = {route.path: route for route in settings.routes}
        self.bytes_left = settings.bytes_in_flight
        self.running: set[asyncio.Task[None]] = set()
        self._resting: dict[str, dict[IOStream, asyncio.TimerHandle]] = defaultdict(dict)
        """Unused connections by backend, each with the timer that closes it."""

    def start_request(self, server_conn: object, request_conn: Any) -> "Exchange":
        return Exchange(self, request_conn)

    async def to_backend(self, route: Route) -> IOStream:
        """A connection to the backend of the route.

        Raises:
            Refused: the backend has ended.
        """
        path = route.backend or self.settings.backend
        while self._resting[path]:
            stream, end = self._resting[path].popitem()
            end.cancel()
            if not stream.closed():
                return stream
        return await connect(path)

    def rest(self, route: Route, stream: IOStream) -> None:
        """Keep a connection to the route's backend for the next request, if one comes soon."""
        resting = self._resting[route.backend or self.settings.backend]

        def end() -> None:
            del resting[stream]
            stream.close()

        resting[stream] = asyncio.get_running_loop().call_later(REST_S, end)


async def serve(settings: FrontDoorSettings) -> None:
    """Serve until standard input ends: the server process has ended, or has closed it."""
    tls = None
    if settings.certificate is not None:
        tls = tls_context(settings.certificate, settings.key, settings.client_ca)
    door = FrontDoor(settings)
    listener = socket.socket(fileno=settings.listener)
    stop_accepting = Entrance(door, largest_body=2**62, tls=tls).open(listener)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    print("open", flush=True)
    await ended.wait()
    stop_accepting()
    listener.close()
    if door.running:
        await asyncio.wait(door.running, timeout=1.0)


def main() -> None:
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # from a terminal or a batch system; the server process decides when to end
        signal.signal(number, signal.SIG_IGN)
    logging.getLogger("tornado").setLevel(logging.ERROR)
    return_freed_memory()
    settings = FrontDoorSettings.from_json(sys.stdin.buffer.readline())
    asyncio.run(serve(settings))
    os._exit(0)


if __name__ == "__main__":
    main()
