"""A front door's backend without Triton: an HTTP server on a Unix socket, in a thread of the service's own process."""

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.netutil import bind_unix_socket
from tornado.web import Application, RequestHandler, stream_request_body

from nemo_style_rlhf.wire.front_door import Route
from nemo_style_rlhf.wire.kserve import HEAD_LENGTH_HEADER, decode_request, encode_response
from nemo_style_rlhf.wire.messages import BOOT_HEADER, Array, Code, ProtocolError

LOGGER = logging.getLogger(__name__)
THREADS = 64
"""Calls of one endpoint that may wait at the same time. Calls of another endpoint, such as the status, never wait for them."""
Handle = Callable[[str, dict[str, Array]], Mapping[str, Array]]


class UnixBackend:
    """Answers the requests of a front door with ``handle(endpoint, inputs)``, each call in a thread of a pool."""

    def __init__(
        self, path: Path, routes: Sequence[Route], handle: Handle, *, boot_id: str, one_at_a_time: bool = False
    ) -> None:
        """Listen at ``path``.

        Args:
            one_at_a_time: an endpoint's next call waits until its last one is answered, as with Triton.
            handle: raises ProtocolError to refuse; a fatal one sets :attr:`fatal`, any other error answers INTERNAL and sets it.
        """
        self.fatal = threading.Event()
        self._path, self._routes, self._handle, self._boot_id = path, routes, handle, boot_id
        threads = 1 if one_at_a_time else THREADS
        self._calls = {route: ThreadPoolExecutor(threads, route.endpoint.name) for route in routes}
        opened = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, args=(opened,), name="backend", daemon=True)
        self._thread.start()
        if not opened.wait(10.0):
            raise RuntimeError("the backend did not open its socket")

    @property
    def alive(self) -> bool:
        """False once the thread has died, or the socket was removed, as programs that clean up temporary files do."""
        return self._thread.is_alive() and self._path.is_socket()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        for pool in self._calls.values():
            pool.shutdown(wait=False, cancel_futures=True)

    def _serve(self, opened: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        paths = [(route.path, _Call, {"backend": self, "route": route}) for route in self._routes]
        largest = max(route.largest_body for route in self._routes)
        application = Application(paths, log_function=lambda _: None)  # by default Tornado logs every call
        server = HTTPServer(application, max_body_size=largest, max_buffer_size=2 * largest)
        server.add_socket(bind_unix_socket(str(self._path), 0o600))
        self._loop.call_soon(opened.set)
        self._loop.run_forever()

    def answer(self, route: Route, body: bytearray, head_length: int, boot_id: str) -> tuple[int, bytes, int | None]:
        """Return the status, the body, and the length of its JSON head if tensors follow it."""
        try:
            if boot_id not in ("", self._boot_id):
                raise ProtocolError(
                    Code.RESTARTED,
                    f"the server restarted: its boot id is {self._boot_id}, the request expects {boot_id}",
                )
            outputs = self._handle(route.endpoint.name, decode_request(route.endpoint, body, head_length))
            content, length = encode_response(route.endpoint, outputs, json.loads(body[:head_length]))
            return 200, content, length
        except ProtocolError as error:
            if error.fatal:
                LOGGER.error("%s: %s", route.endpoint.name, error)
                self.fatal.set()
            return error.code.status, _error(error), None
        except Exception:
            LOGGER.exception("%s failed, the server ends", route.endpoint.name)
            self.fatal.set()
            failed = ProtocolError(Code.INTERNAL, f"{route.endpoint.name} failed and the server ends; its log says why")
            return failed.code.status, _error(failed), None

    def call(self, route: Route, *arguments: Any) -> "asyncio.Future[tuple[int, bytes, int | None]]":
        """Run :meth:`answer` in a thread of the pool."""
        return self._loop.run_in_executor(self._calls[route], self.answer, route, *arguments)


@stream_request_body
class _Call(RequestHandler):
    """Keeps its body once; Tornado would keep it twice until it is answered."""

    def initialize(self, backend: UnixBackend, route: Route) -> None:
        self._backend, self._route, self._body = backend, route, bytearray()

    def data_received(self, chunk: bytes) -> None:
        self._body += chunk

    async def post(self) -> None:
        headers = self.request.headers
        head_length = int(headers.get(HEAD_LENGTH_HEADER, len(self._body)))
        status, body, answer_head = await self._backend.call(
            self._route, self._body, head_length, headers.get(BOOT_HEADER, "")
        )
        self.set_status(status)
        self.set_header("Content-Type", "application/octet-stream" if answer_head is not None else "application/json")
        if answer_head is not None:
            self.set_header(HEAD_LENGTH_HEADER, str(answer_head))
        self.finish(body)


def _error(error: ProtocolError) -> bytes:
    return json.dumps({"error": str(error)}).encode()
