"""Accepts the connections of an HTTP server, with limits for unauthenticated clients: clients that have shown no secret."""

import errno
import hmac
import socket
import ssl
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tornado.http1connection import HTTP1ConnectionParameters, HTTP1ServerConnection
from tornado.httputil import HTTPConnection, HTTPMessageDelegate, HTTPServerConnectionDelegate, HTTPServerRequest
from tornado.iostream import IOStream, SSLIOStream
from tornado.netutil import add_accept_handler

from nemo_style_rlhf.wire.limits import (
    BODY_S,
    BUFFER_BYTES,
    CHUNK_BYTES,
    HTTP_HEAD_BYTES,
    HTTP_HEAD_S,
    IDLE_S,
    STRANGERS,
    STRANGERS_PER_ADDRESS,
)


@dataclass(eq=False)
class Visitor:
    """One connection; the ``context`` of its requests."""

    stream: IOStream
    remote_ip: str
    parameters: HTTP1ConnectionParameters
    strangers: "OrderedDict[Visitor, None]" = field(repr=False)
    """The unauthenticated connections of its entrance."""

    def shows(self, given: str, secret: str) -> bool:
        """Return True if ``given`` is the secret, compared in constant time. The connection is then authenticated."""
        right = hmac.compare_digest(given.encode(), secret.encode())
        if right:
            self.welcome()
        return right

    def welcome(self) -> None:
        """Mark the connection as authenticated."""
        self.strangers.pop(self, None)
        self.parameters.header_timeout = IDLE_S


class Entrance(HTTPServerConnectionDelegate):
    """Accepts connections and passes their requests on."""

    def __init__(
        self,
        server: HTTPServerConnectionDelegate,
        *,
        largest_body: int,
        body_s: float = BODY_S,
        tls: ssl.SSLContext | None = None,
        strangers_per_address: int = STRANGERS_PER_ADDRESS,
    ) -> None:
        """Serve the connections that :meth:`open` accepts.

        Args:
            server: serves each request, and asks :meth:`Visitor.shows` before it reads a body.
            largest_body: maximum bytes; a request that announces more is not read.
            body_s: seconds in which a body must arrive, unless ``server`` sets others for a request.
        """
        self._server, self._tls = server, tls
        self._largest_body, self._body_s = largest_body, body_s
        self._strangers: OrderedDict[Visitor, None] = OrderedDict()
        self._per_address = strangers_per_address

    def open(self, listener: socket.socket) -> Callable[[], None]:
        """Accept the connections of a listening socket in the running event loop. Return a function that stops this."""
        listener.setblocking(False)
        return add_accept_handler(listener, self._accept)

    def _accept(self, connection: socket.socket, address: tuple[Any, ...]) -> None:
        """Serve a connection. If its address or the server has too many unauthenticated ones, close the oldest of them."""
        try:
            stream = self._stream(connection)
        except OSError:  # the client has hung up already
            connection.close()
            return
        parameters = HTTP1ConnectionParameters(
            chunk_size=CHUNK_BYTES, max_header_size=HTTP_HEAD_BYTES, header_timeout=HTTP_HEAD_S,
            max_body_size=self._largest_body, body_timeout=self._body_s,
        )  # fmt: skip
        visitor = Visitor(stream, str(address[0]), parameters, self._strangers)
        neighbors = [other for other in self._strangers if other.remote_ip == visitor.remote_ip]
        if len(neighbors) >= self._per_address:
            self._turn_away(neighbors[0])
        elif len(self._strangers) >= STRANGERS:
            self._turn_away(next(iter(self._strangers)))
        self._strangers[visitor] = None
        stream.set_nodelay(True)
        HTTP1ServerConnection(stream, parameters, visitor).start_serving(self)

    def _turn_away(self, visitor: Visitor) -> None:
        visitor.stream.close()
        del self._strangers[visitor]  # at once: on_close comes after more connections have been accepted

    def _stream(self, connection: socket.socket) -> IOStream:
        if self._tls is None:
            return IOStream(connection, max_buffer_size=BUFFER_BYTES, read_chunk_size=CHUNK_BYTES)
        link = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return TlsStream(link, max_buffer_size=BUFFER_BYTES, read_chunk_size=CHUNK_BYTES)

    def start_request(self, server_conn: object, request_conn: HTTPConnection) -> HTTPMessageDelegate:
        return self._server.start_request(server_conn, request_conn)

    def on_close(self, server_conn: Any) -> None:
        self._strangers.pop(server_conn.context, None)


class TlsStream(SSLIOStream):
    """Treats a record that cannot be decrypted as a reset of the connection. Tornado would log a traceback for each."""

    def read_from_fd(self, buf: bytearray | memoryview) -> int | None:
        try:
            return super().read_from_fd(buf)
        except ssl.SSLError as error:
            raise ConnectionResetError(errno.ECONNRESET, str(error)) from error


def visitor_of(request: HTTPServerRequest) -> Visitor:
    """The connection of a request."""
    visitor: Visitor = request.connection.context  # type: ignore[union-attr]
    return visitor
