"""The front door: a separate process that owns the public port, the only process that strangers reach.

Tornado's HTTP server reads requests, within bounds on heads, bodies and time. The door compares the token before it reads a body,
writes the head of every request anew (``kserve.canonical_head``) and passes the tensors on to Triton, which listens on a Unix
socket behind it. Once Triton has a whole request, the door reads the answer to its end, whether or not the client still waits, so
that Triton never sees a client hang up. The token stays in this process.

    python -m nemo_style_rlhf.critic_service.front_door    # reads its Settings as JSON from standard input, which stays open
"""

import asyncio
import hmac
import json
import logging
import os
import signal
import socket
import ssl
import sys
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tornado.http1connection import HTTP1Connection, HTTP1ConnectionParameters, HTTP1ServerConnection
from tornado.httputil import (
    HTTPHeaders,
    HTTPMessageDelegate,
    HTTPServerConnectionDelegate,
    RequestStartLine,
    ResponseStartLine,
)
from tornado.iostream import IOStream, StreamClosedError
from tornado.tcpserver import TCPServer

from nemo_style_rlhf.critic_service import confine, protocol
from nemo_style_rlhf.critic_service.kserve import HEAD_LENGTH_HEADER, binary_request, canonical_head
from nemo_style_rlhf.critic_service.protocol import Code, Endpoint, ProtocolError
from nemo_style_rlhf.launch.malloc import return_freed_memory

HTTP_HEAD_BYTES = 16 * 2**10
HTTP_HEAD_S = 10.0
"""Seconds within which a stranger's connection must bring a whole head, TLS handshake included."""
IDLE_S = 600.0
"""Seconds for which a connection that has shown the token may rest between requests."""
BODY_S = 30.0
SLOWEST_LINK = 2**18
"""Bytes per second. A body may take BODY_S seconds plus its transfer time at this rate."""
TENSOR_HEAD_BYTES = 64 * 2**10
JSON_BODY_BYTES = 2**20
"""Largest request without binary tensors, or to an endpoint that takes only JSON."""
PLAN_BYTES = 17 * 2**20
"""Largest JSON of a train plan, which max_request_bytes does not count."""
UNREAD_BYTES, UNREAD_S = 2**20, 1.0
"""Limits on reading a refused body. The door reads some of it so that the client can read the answer."""
CHUNK_BYTES = 2**18
SOCKET_BUFFER_BYTES = 4 * 2**20
STRANGERS = 256
STRANGERS_PER_ADDRESS = 64
"""Maximum number of connections that have not shown the token; a new one replaces the oldest."""
CALLS_IN_MEMORY = 32
"""Maximum number of calls of the largest size that Triton may hold at once."""
FORWARDED = ("Content-Type", "Content-Length", HEAD_LENGTH_HEADER)
REASONS = {400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed", 411: "Length Required",
           413: "Content Too Large", 415: "Unsupported Media Type", 503: "Service Unavailable"}  # fmt: skip

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """Settings that the server process sends to its front door."""

    listener: int
    """Descriptor of the public port's socket, which both processes have open."""
    token: str = field(repr=False)
    triton: str
    """Path of Triton's socket."""
    metrics: str | None
    """Path of the socket of Triton's metrics; None if they are not served."""
    endpoints: list[str]
    max_request_bytes: int
    certificate: str | None = None
    key: str | None = None
    client_ca: str | None = None


class Refused(Exception):
    """The front door refuses a request and answers it itself."""

    def __init__(self, status: int, code: Code, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.code = code


def tls_context(certificate: str, key: str | None, client_ca: str | None) -> ssl.SSLContext:
    """The server's side of TLS. With ``client_ca``, clients must show a certificate that this authority signed."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=client_ca)
    context.load_cert_chain(certificate, key)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@dataclass(eq=False)
class Visitor:
    """One connection."""

    stream: IOStream
    address: str
    parameters: HTTP1ConnectionParameters


class FrontDoor(TCPServer, HTTPServerConnectionDelegate):
    """Accepts connections and starts an :class:`Exchange` for each request."""

    def __init__(self, settings: Settings) -> None:
        tls = None
        if settings.certificate is not None:
            tls = tls_context(settings.certificate, settings.key, settings.client_ca)
        super().__init__(ssl_options=tls, max_buffer_size=2**24, read_chunk_size=CHUNK_BYTES)
        self.settings = settings
        self.token = settings.token.encode()
        # Triton and both ends of its shared memory keep room for the largest request that each endpoint has seen.
        tensors = settings.max_request_bytes + TENSOR_HEAD_BYTES
        self.largest_body = {endpoint.name: JSON_BODY_BYTES for endpoint in protocol.ENDPOINTS}
        self.largest_body |= {protocol.INFER.name: tensors, protocol.REWARD_INFER.name: tensors}
        self.largest_body[protocol.TRAIN.name] = tensors + PLAN_BYTES
        self.endpoints: dict[str, Endpoint] = {
            f"/v2/models/{endpoint.name}/infer": endpoint
            for endpoint in protocol.ENDPOINTS
            if endpoint.name in settings.endpoints
        }
        self.bytes_left = CALLS_IN_MEMORY * max(self.largest_body.values())
        self.running: set[asyncio.Task[None]] = set()
        self._strangers: OrderedDict[Visitor, None] = OrderedDict()
        self._resting: list[IOStream] = []

    def handle_stream(self, stream: IOStream, address: tuple[Any, ...]) -> None:
        """Serve a connection. If its address has too many strangers, the oldest connection is closed."""
        parameters = HTTP1ConnectionParameters(
            chunk_size=CHUNK_BYTES, max_header_size=HTTP_HEAD_BYTES, header_timeout=HTTP_HEAD_S, max_body_size=2**62
        )
        visitor = Visitor(stream, str(address[0]), parameters)
        neighbors = [other for other in self._strangers if other.address == visitor.address]
        if len(neighbors) >= STRANGERS_PER_ADDRESS:
            neighbors[0].stream.close()
        elif len(self._strangers) >= STRANGERS:
            next(iter(self._strangers)).stream.close()
        self._strangers[visitor] = None
        stream.set_nodelay(True)
        HTTP1ServerConnection(stream, parameters, visitor).start_serving(self)

    def start_request(self, server_conn: object, request_conn: Any) -> "Exchange":
        return Exchange(self, request_conn)

    def on_close(self, server_conn: Any) -> None:
        self._strangers.pop(server_conn.context, None)

    def welcome(self, visitor: Visitor) -> None:
        """Note that the connection has shown the token."""
        self._strangers.pop(visitor, None)
        visitor.parameters.header_timeout = IDLE_S

    async def to_triton(self) -> IOStream:
        """A connection to Triton.

        Raises:
            Refused: Triton has ended.
        """
        while self._resting:
            stream = self._resting.pop()
            if not stream.closed():
                return stream
        return await _connect(self.settings.triton)

    def rest(self, stream: IOStream) -> None:
        """Keep a connection to Triton for the next request."""
        self._resting.append(stream)


class Exchange(HTTPMessageDelegate):
    """One request and its answer. Tornado calls the four delegate methods in the order in which they are defined here."""

    def __init__(self, door: FrontDoor, connection: HTTP1Connection) -> None:
        self._door = door
        self._connection = connection
        self._head = bytearray()
        self._head_bytes: int | None = None
        self._reserved = 0
        self._hop: HTTP1Connection | None = None
        """The connection on which the request goes to Triton, once it has begun."""
        self._refused = False
        """Whether the request was refused. After the client hangs up, Tornado still delivers buffered parts of a refused body."""

    async def headers_received(self, start_line: Any, headers: HTTPHeaders) -> None:
        self._method = start_line.method
        self._unread = "Transfer-Encoding" in headers or headers.get("Content-Length", "0") != "0"
        try:
            await self._admit(start_line, headers)
        except Refused as refusal:
            await self._refuse(refusal)

    async def data_received(self, chunk: bytes) -> None:
        if self._refused or self._method == "GET":  # the body of a metrics request has no meaning
            return
        try:
            if self._hop is not None:
                await self._hop.write(chunk)
                return
            self._head += chunk
            if self._head_bytes is not None and len(self._head) >= self._head_bytes:
                rest = bytes(self._head[self._head_bytes :])
                head = canonical_head(
                    self._endpoint, bytes(self._head[: self._head_bytes]), self._body_bytes - self._head_bytes
                )
                self._head.clear()
                await self._send(head, rest, self._body_bytes - self._head_bytes - len(rest))
        except ProtocolError as error:
            await self._refuse(Refused(400, error.code, error.message))
        except Refused as refusal:
            await self._refuse(refusal)
        except StreamClosedError:
            await self._refuse(_gone())

    def finish(self) -> None:
        if self._refused:
            return
        self._unread = False
        task = asyncio.get_running_loop().create_task(self._answer())
        self._door.running.add(task)
        task.add_done_callback(self._door.running.discard)

    def on_connection_close(self) -> None:
        """The client hung up during its request, or its connection was closed."""
        self._end()

    async def _admit(self, start_line: RequestStartLine, headers: HTTPHeaders) -> None:
        visitor: Visitor = self._connection.context  # type: ignore[assignment]
        given = headers.get(protocol.TOKEN_HEADER, "").encode()
        if not hmac.compare_digest(given, self._door.token):
            problem = "is wrong" if given else "is missing"
            raise Refused(401, Code.UNAUTHORIZED, f"the header {protocol.TOKEN_HEADER} {problem}")
        self._door.welcome(visitor)
        self._connection.set_body_timeout(BODY_S)
        if (start_line.method, start_line.path) == ("GET", "/metrics") and self._door.settings.metrics is not None:
            self._body_bytes = 0
            triton = await _connect(self._door.settings.metrics)
            self._request(triton, "GET", "/metrics", HTTPHeaders({"Host": "localhost", "Connection": "close"}))
            return
        if start_line.path not in self._door.endpoints:
            raise Refused(404, Code.NOT_FOUND, "this server has no such endpoint")
        if start_line.method != "POST":
            raise Refused(405, Code.INVALID, f"the method is {start_line.method[:20]}, expected POST")
        self._endpoint = self._door.endpoints[start_line.path]
        self._boot = headers.get(protocol.BOOT_HEADER, "")[:64]
        if self._boot and not (self._boot.isascii() and self._boot.isalnum()):  # Triton's JSON cannot carry every byte
            raise Refused(400, Code.INVALID, f"the header {protocol.BOOT_HEADER} is no boot id")
        self._body_bytes = self._length(headers)
        self._reserve(self._body_bytes)
        self._connection.set_body_timeout(BODY_S + self._body_bytes / SLOWEST_LINK)

    def _length(self, headers: HTTPHeaders) -> int:
        if "Transfer-Encoding" in headers:
            raise Refused(411, Code.INVALID, "the body is chunked: send it with its Content-Length")
        if headers.get("Content-Encoding", "identity") != "identity":
            raise Refused(415, Code.INVALID, "the body is encoded: send it as it is")
        length = headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit() or len(length) > 18:
            raise Refused(411, Code.INVALID, "the request needs one Content-Length")
        largest = self._door.largest_body[self._endpoint.name]
        if HEAD_LENGTH_HEADER in headers:
            head_length = headers[HEAD_LENGTH_HEADER]
            if not head_length.isascii() or not head_length.isdigit() or len(head_length) > 18:
                raise Refused(400, Code.INVALID, f"{HEAD_LENGTH_HEADER} is {head_length[:20]!r}, expected a number")
            self._head_bytes = int(head_length)
            if self._head_bytes > min(TENSOR_HEAD_BYTES, int(length)):
                raise Refused(400, Code.INVALID, f"{HEAD_LENGTH_HEADER} is {head_length}, expected at most {TENSOR_HEAD_BYTES} "
                              f"and the length of the body, {length}")  # fmt: skip
        else:
            largest = min(largest, JSON_BODY_BYTES)
        if int(length) > largest:
            how = (
                "split or shorten it"
                if self._head_bytes is not None
                else f"send tensors in binary, with {HEAD_LENGTH_HEADER}"
            )
            raise Refused(413, Code.INVALID, f"the body has {length} bytes, expected at most {largest}: {how}")
        return int(length)

    def _reserve(self, nbytes: int) -> None:
        if nbytes > self._door.bytes_left:
            raise Refused(503, Code.STOPPING, "too many calls wait already")
        self._door.bytes_left -= nbytes
        self._reserved = nbytes

    async def _send(self, head: bytes, start: bytes, rest: int, *, head_bytes: int | None = None) -> None:
        """Begin the request to Triton: send a head and the start of the tensors, and announce ``rest`` more bytes."""
        triton = await self._door.to_triton()
        headers = HTTPHeaders({
            "Host": "localhost",
            "Content-Type": "application/octet-stream",
            "Content-Length": str(len(head) + len(start) + rest),
            HEAD_LENGTH_HEADER: str(len(head) if head_bytes is None else head_bytes),
        })  # fmt: skip
        if self._boot:
            headers[protocol.BOOT_HEADER] = self._boot
        await self._request(triton, "POST", f"/v2/models/{self._endpoint.name}/infer", headers).write(head + start)

    def _request(self, triton: IOStream, method: str, path: str, headers: HTTPHeaders) -> HTTP1Connection:
        parameters = HTTP1ConnectionParameters(chunk_size=CHUNK_BYTES, max_body_size=2**62)
        self._hop = HTTP1Connection(triton, True, parameters)
        self._hop.write_headers(RequestStartLine(method, path, "HTTP/1.1"), headers)
        return self._hop

    async def _answer(self) -> None:
        """Read Triton's answer to its end, whatever the client does: the request is complete."""
        try:
            if self._hop is None:
                body, head_bytes = binary_request(self._endpoint, bytes(self._head))
                await self._send(body, b"", 0, head_bytes=head_bytes)
            assert self._hop is not None
            self._hop.finish()
            answer = Answer(self._connection)
            if (
                await self._hop.read_response(answer) and self._method != "GET"
            ):  # Triton's metrics have a separate connection
                self._door.rest(self._hop.stream)
                self._hop = None
            if not answer.begun:
                await self._refuse(_gone())
        except ProtocolError as error:
            await self._refuse(Refused(400, error.code, error.message))
        except Refused as refusal:
            await self._refuse(refusal)
        except StreamClosedError:
            await self._refuse(_gone())
        except Exception:  # a defect of the door: the client must not wait forever
            self._connection.stream.close()
            raise
        finally:
            self._end()

    async def _refuse(self, refusal: Refused) -> None:
        """Answer with an error. If the body has not arrived, read only its start, and close the connection."""
        self._refused = True
        self._end()
        if self._connection.stream.closed():
            return
        text = json.dumps({"error": str(ProtocolError(refusal.code, str(refusal)))}).encode()
        headers = HTTPHeaders({"Content-Type": "application/json", "Content-Length": str(len(text))})
        status = ResponseStartLine("HTTP/1.1", refusal.status, REASONS[refusal.status])
        self._connection.write_headers(status, headers, text if self._method != "HEAD" else None)
        if self._unread:  # closing a socket with unread data would discard the answer
            with suppress(StreamClosedError, TimeoutError):
                await asyncio.wait_for(self._connection.stream.read_bytes(UNREAD_BYTES), UNREAD_S)
        if not self._connection.stream.closed():
            self._connection.finish()

    def _end(self) -> None:
        self._door.bytes_left += self._reserved
        self._reserved = 0
        if self._hop is not None:  # a request or its answer is under way
            self._hop.stream.close()
            self._hop = None


class Answer(HTTPMessageDelegate):
    """Passes Triton's answer to a client that may have gone."""

    def __init__(self, connection: HTTP1Connection) -> None:
        self._connection = connection
        self.begun = False

    async def headers_received(self, start_line: Any, headers: HTTPHeaders) -> None:
        self.begun = True
        kept = HTTPHeaders({name: headers[name] for name in FORWARDED if name in headers})
        reason = ResponseStartLine("HTTP/1.1", start_line.code, start_line.reason)
        await self._within_time(self._connection.write_headers(reason, kept))

    async def data_received(self, chunk: bytes) -> None:
        if not self._connection.stream.closed():
            await self._within_time(self._connection.write(chunk))

    def finish(self) -> None:
        if not self._connection.stream.closed():
            self._connection.finish()

    def on_connection_close(self) -> None:
        if self.begun:  # a partial answer must not look complete
            self._connection.stream.close()

    async def _within_time(self, written: Any) -> None:
        try:
            await asyncio.wait_for(written, BODY_S)
        except (StreamClosedError, TimeoutError):
            self._connection.stream.close()


def _gone() -> Refused:
    return Refused(503, Code.STOPPING, "the server is stopping")


async def _connect(path: str) -> IOStream:
    sock = socket.socket(socket.AF_UNIX)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    stream = IOStream(sock, max_buffer_size=2**24, read_chunk_size=CHUNK_BYTES)
    try:
        await stream.connect(path)  # type: ignore[arg-type]
    except StreamClosedError as error:
        raise _gone() from error
    return stream


async def serve(settings: Settings) -> None:
    """Serve until standard input ends: the server process has ended, or has closed it."""
    door = FrontDoor(settings)
    listener = socket.socket(fileno=settings.listener)
    listener.setblocking(False)
    door.add_socket(listener)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    print("open", flush=True)
    await ended.wait()
    door.stop()
    if door.running:
        await asyncio.wait(door.running, timeout=1.0)


def main() -> None:
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # from a terminal or a batch system; the server process decides when to end
        signal.signal(number, signal.SIG_IGN)
    confine.end_with_parent(signal.SIGKILL)  # a stopped door does not see its input end, and would keep the port
    logging.getLogger("tornado").setLevel(logging.ERROR)
    return_freed_memory()
    settings = Settings(**json.loads(sys.stdin.buffer.readline()))
    asyncio.run(serve(settings))
    os._exit(0)


if __name__ == "__main__":
    main()
