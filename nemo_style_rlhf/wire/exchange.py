"""One request through the front door, and its answer."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from tornado.http1connection import HTTP1Connection, HTTP1ConnectionParameters
from tornado.httputil import HTTPHeaders, HTTPMessageDelegate, RequestStartLine, ResponseStartLine
from tornado.iostream import IOStream, StreamClosedError

from nemo_style_rlhf.wire import messages
from nemo_style_rlhf.wire.entrance import Visitor
from nemo_style_rlhf.wire.kserve import HEAD_LENGTH_HEADER, binary_request, canonical_head
from nemo_style_rlhf.wire.limits import (
    BODY_S,
    CHUNK_BYTES,
    JSON_BODY_BYTES,
    SLOWEST_LINK,
    TENSOR_HEAD_BYTES,
    UNREAD_BYTES,
    UNREAD_S,
)
from nemo_style_rlhf.wire.messages import Code, ProtocolError

if TYPE_CHECKING:
    from nemo_style_rlhf.wire.front_door import FrontDoor

SOCKET_BUFFER_BYTES = 4 * 2**20
FORWARDED = ("Content-Type", "Content-Length", HEAD_LENGTH_HEADER)
REASONS = {400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed", 411: "Length Required",
           413: "Content Too Large", 415: "Unsupported Media Type", 503: "Service Unavailable"}  # fmt: skip


class Refused(Exception):
    """The front door refuses a request and answers it itself."""

    def __init__(self, status: int, code: Code, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.code = code


class Exchange(HTTPMessageDelegate):
    """One request and its answer. Tornado calls the four delegate methods in the order in which they are defined here."""

    def __init__(self, door: "FrontDoor", connection: HTTP1Connection) -> None:
        self._door = door
        self._connection = connection
        self._head = bytearray()
        self._head_bytes: int | None = None
        self._reserved = 0
        self._hop: HTTP1Connection | None = None
        """The connection to the backend, once the request to it has begun."""
        self._refused = False
        """True once the request was refused. After the client hangs up, Tornado still delivers buffered parts of its body."""

    async def headers_received(self, start_line: Any, headers: HTTPHeaders) -> None:
        self._method = start_line.method
        self._unread = "Transfer-Encoding" in headers or headers.get("Content-Length", "0") != "0"
        async with self._refusing():
            await self._admit(start_line, headers)

    async def data_received(self, chunk: bytes) -> None:
        if self._refused or self._method == "GET":  # the body of a metrics request has no meaning
            return
        async with self._refusing():
            if self._hop is not None:
                await self._hop.write(chunk)
                return
            self._head += chunk
            if self._head_bytes is not None and len(self._head) >= self._head_bytes:
                rest = bytes(self._head[self._head_bytes :])
                head = canonical_head(
                    self._route.endpoint, bytes(self._head[: self._head_bytes]), self._body_bytes - self._head_bytes
                )
                self._head.clear()
                await self._send(head, rest, self._body_bytes - self._head_bytes - len(rest))

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
        given = headers.get(messages.TOKEN_HEADER, "")
        if not visitor.shows(given, self._door.settings.token):
            problem = "is wrong" if given else "is missing"
            raise Refused(401, Code.UNAUTHORIZED, f"the header {messages.TOKEN_HEADER} {problem}")
        self._connection.set_body_timeout(BODY_S)
        if (start_line.method, start_line.path) == ("GET", "/metrics") and self._door.settings.metrics is not None:
            self._body_bytes = 0
            backend = await connect(self._door.settings.metrics)
            self._request(backend, "GET", "/metrics", HTTPHeaders({"Host": "localhost", "Connection": "close"}))
            return
        if start_line.path not in self._door.routes:
            raise Refused(404, Code.NOT_FOUND, "this server has no such endpoint")
        if start_line.method != "POST":
            raise Refused(405, Code.INVALID, f"the method is {start_line.method[:20]}, expected POST")
        self._route = self._door.routes[start_line.path]
        self._boot = headers.get(messages.BOOT_HEADER, "")[:64]
        if self._boot and not (self._boot.isascii() and self._boot.isalnum()):  # Triton's JSON cannot carry every byte
            raise Refused(400, Code.INVALID, f"the header {messages.BOOT_HEADER} is no boot id")
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
        largest = self._route.largest_body
        if HEAD_LENGTH_HEADER in headers:
            head_length = headers[HEAD_LENGTH_HEADER]
            if not head_length.isascii() or not head_length.isdigit() or len(head_length) > 18:
                raise Refused(400, Code.INVALID, f"the header {HEAD_LENGTH_HEADER} is no number")
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
        """Begin the request to the backend: send a head and the start of the tensors, and announce ``rest`` more bytes."""
        backend = await self._door.to_backend(self._route)
        headers = HTTPHeaders({
            "Host": "localhost",
            "Content-Type": "application/octet-stream",
            "Content-Length": str(len(head) + len(start) + rest),
            HEAD_LENGTH_HEADER: str(len(head) if head_bytes is None else head_bytes),
        })  # fmt: skip
        if self._boot:
            headers[messages.BOOT_HEADER] = self._boot
        await self._request(backend, "POST", self._route.path, headers).write(head + start)

    def _request(self, backend: IOStream, method: str, path: str, headers: HTTPHeaders) -> HTTP1Connection:
        parameters = HTTP1ConnectionParameters(chunk_size=CHUNK_BYTES, max_body_size=2**62)
        self._hop = HTTP1Connection(backend, True, parameters)
        self._hop.write_headers(RequestStartLine(method, path, "HTTP/1.1"), headers)
        return self._hop

    async def _answer(self) -> None:
        """Read the backend's answer to its end, whatever the client does: the request is complete."""
        try:
            async with self._refusing():
                if self._hop is None:
                    body, head_bytes = binary_request(self._route.endpoint, bytes(self._head))
                    await self._send(body, b"", 0, head_bytes=head_bytes)
                assert self._hop is not None
                self._hop.finish()
                answer = AnswerRelay(self._connection)
                whole = await self._hop.read_response(answer)
                if whole and self._method != "GET":  # metrics have a separate connection
                    self._door.rest(self._route, self._hop.stream)
                    self._hop = None
                if not answer.begun:
                    raise _gone()
        except Exception:  # a defect of the door: the client must not wait forever
            self._connection.stream.close()
            raise
        finally:
            self._end()

    @asynccontextmanager
    async def _refusing(self) -> AsyncIterator[None]:
        """Answer the errors of a request."""
        try:
            yield
        except ProtocolError as error:
            await self._refuse(Refused(400, error.code, error.message))
        except Refused as refusal:
            await self._refuse(refusal)
        except StreamClosedError:
            await self._refuse(_gone())

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


class AnswerRelay(HTTPMessageDelegate):
    """Passes the backend's answer to a client that may have gone."""

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


async def connect(path: str) -> IOStream:
    sock = socket.socket(socket.AF_UNIX)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    stream = IOStream(sock, max_buffer_size=2**24, read_chunk_size=CHUNK_BYTES)
    try:
        await stream.connect(path)  # type: ignore[arg-type]
    except StreamClosedError as error:
        raise _gone() from error
    return stream
