"""The process of the gateway: the OpenAI endpoint of programs whose policy is in training.

It is a child of the trainer. They exchange JSON lines over a socket pair, the child's standard input: orders one way, events the
other. The trainer samples. This process parses requests, starts the user's programs and ends them, so that this work does not
hold the trainer's interpreter lock. However the trainer ends, this process and all programs end with it.

    python -m nemo_style_rlhf.agents.gateway_process    # only as a child of the trainer
"""

import asyncio
import json
import logging
import os
import signal
import socket
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields
from typing import Any

from tornado.iostream import StreamClosedError
from tornado.web import Application, HTTPError, RequestHandler, stream_request_body

from nemo_style_rlhf.agents import programs
from nemo_style_rlhf.agents.api_answers import Answer, models
from nemo_style_rlhf.agents.api_requests import (
    ApiError,
    Body,
    FailBody,
    NextBody,
    Request,
    read_chat,
    read_json,
    read_text,
    read_typed,
)
from nemo_style_rlhf.agents.session_registry import GatewaySession, GatewaySettings, SessionRegistry
from nemo_style_rlhf.wire.entrance import Entrance, visitor_of
from nemo_style_rlhf.wire.limits import BODY_S, SLOWEST_LINK, STRANGERS, UNREAD_BYTES

MOST_DIGITS = 18
"""Digits of a Content-Length that are read. A body with that many digits is always too large."""
LINE_BYTES = 2**30
END_S = 2.0
"""Maximum seconds to wait for programs to end. The remaining ones are killed with this process."""
PING_S = 0.5
"""Seconds between two alive messages to the trainer."""
log = logging.getLogger(__name__)


@stream_request_body
class Handler(RequestHandler):
    """Answers only requests with a valid key. The key is checked before the body is kept."""

    methods: tuple[str, ...] = ("POST",)

    @property
    def registry(self) -> SessionRegistry:
        registry: SessionRegistry = self.settings["registry"]
        return registry

    def initialize(self) -> None:
        self._body = bytearray()
        self._read = 0
        self._answered = False
        self._refused: ApiError | None = None

    def set_default_headers(self) -> None:
        self.set_header("Content-Type", "application/json")
        self.clear_header("Server")

    def prepare(self) -> None:
        """Check the head. A refused body is read and dropped unless it is large: otherwise the client would lose the answer."""
        length = self.request.headers.get("Content-Length", "0")
        size = int(length[:MOST_DIGITS]) if length.isascii() and length.isdigit() else 0
        try:
            self.admit(self._key())
            if self.request.method not in self.methods:
                raise ApiError(405, f"{self.request.method} is not possible here: use {self.methods[0]}")
            if size > self.registry.settings.max_request_bytes:
                raise self._too_large()
        except ApiError as error:
            if size > UNREAD_BYTES:
                raise
            self._refused = error

    async def _answer(self, *words: str) -> None:
        if self._refused is not None:
            raise self._refused
        await self.serve(*words)

    get = head = post = put = patch = delete = options = _answer

    async def serve(self, *words: str) -> None:
        """Answer a request whose body has been read.

        Args:
            words: groups of the route's pattern.

        Raises:
            ApiError: the request is wrong.
        """
        raise NotImplementedError

    def admit(self, key: str) -> None:
        """Find the session of ``key``. Raise :class:`ApiError` if there is none."""
        self.session: GatewaySession = self.registry.session(key)
        visitor_of(self.request).welcome()

    def data_received(self, chunk: bytes) -> None:
        self._read += len(chunk)
        if self._answered:
            return
        if self._refused is None and self._read > self.registry.settings.max_request_bytes:
            self._refused = self._too_large()
        if self._refused is None:
            self._body += chunk
            return
        self._body.clear()
        if self._read > UNREAD_BYTES:
            self.send_error(self._refused.status, exc_info=(ApiError, self._refused, None))

    def on_finish(self) -> None:
        self._answered = True

    def _too_large(self) -> ApiError:
        return ApiError(413, f"a request may have {self.registry.settings.max_request_bytes} bytes: send fewer")

    def _key(self) -> str:
        scheme, _, key = self.request.headers.get("Authorization", "").partition(" ")
        return key.strip() if scheme.lower() == "bearer" else ""

    def content(self) -> dict[str, Any]:
        """Read the JSON object in the body.

        Raises:
            ApiError: see :func:`read_json`.
        """
        return read_json(bytes(self._body))

    def known(self, kind: type[Body]) -> Body:
        """The body's fields that ``kind`` has, or its defaults if the body is empty."""
        given = self.content() if self._body else {}
        return read_typed({each.name: given[each.name] for each in fields(kind) if each.name in given}, kind)  # type: ignore[arg-type]

    def reply(self, content: object) -> None:
        self.finish(json.dumps(content))

    def write_error(self, status_code: int, **details: Any) -> None:
        error = details.get("exc_info", (None, None, None))[1]
        if isinstance(error, HTTPError):
            error = ApiError(status_code, "the request cannot be read")
        if not isinstance(error, ApiError):
            error = ApiError(500, "the gateway failed: its log says why")
        self.set_status(error.status)
        self.reply(error.body())

    def log_exception(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not isinstance(error, ApiError | HTTPError | StreamClosedError):
            log.error("%s %s\n%s", self.request.method, self.request.path, "".join(traceback.format_exception(error)))


class ChatCompletions(Handler):
    async def serve(self, *words: str) -> None:
        request = read_chat(self.content(), self.registry.settings.offer)
        answer = await self.asked(request)
        if request.stream:
            self.stream(answer.chat_stream())
        else:
            self.reply(answer.chat())

    async def asked(self, request: Request) -> Answer:
        action, prompt_tokens, name = await self.registry.call(self.session, request)
        return Answer(request, action, name, prompt_tokens)

    def stream(self, chunks: Iterable[dict[str, Any]]) -> None:
        """Send the complete answer as a stream. Errors thus keep their status, and no client reads half an answer."""
        self.set_header("Content-Type", "text/event-stream; charset=utf-8")
        self.set_header("Cache-Control", "no-cache")
        self.finish("".join(f"data: {each}\n\n" for each in [*map(json.dumps, chunks), "[DONE]"]))


class TextCompletions(ChatCompletions):
    async def serve(self, *words: str) -> None:
        request = read_text(self.content(), self.registry.settings.offer)
        answer = await self.asked(request)
        if request.stream:
            self.stream(answer.text_stream())
        else:
            self.reply(answer.text())


class Models(Handler):
    methods = ("GET",)

    async def serve(self, *words: str) -> None:
        listed = models(self.registry.settings.offer)
        if not words:
            self.reply(listed)
        elif words[0] == self.registry.settings.offer.model:
            self.reply(listed["data"][0])
        else:
            raise ApiError(404, "there is no model of this name", param="model", code="model_not_found")


class Next(Handler):
    """Gives a service its next task."""

    _waits: "asyncio.Task[GatewaySession | None] | None" = None

    def admit(self, key: str) -> None:
        if not visitor_of(self.request).shows(key, self.registry.settings.token):
            raise ApiError(401, "this needs the token of the run (agent.token)", code="invalid_api_key")

    async def serve(self, *words: str) -> None:
        asked = self.known(NextBody)
        self._waits = asyncio.ensure_future(self.registry.next(asked.wait_s))
        try:
            session = await self._waits
        except asyncio.CancelledError:  # the service has hung up
            return
        if session is None:
            self.set_status(204)
            self.clear_header("Content-Type")
            self.finish()
            return
        self.set_header("Cache-Control", "no-store")
        content = {"api_key": session.key, "base_url": self.registry.settings.url, "task": session.task}
        try:
            await self.finish(programs.as_json(content))
        except StreamClosedError:
            self.registry.give_back(session)

    def on_connection_close(self) -> None:
        super().on_connection_close()
        if self._waits is not None:
            self._waits.cancel()


class Verdict(Handler):
    """The end of an attempt that a service has fetched."""

    def admit(self, key: str) -> None:
        super().admit(key)
        if self.registry.settings.command:
            raise ApiError(404, "the last line of the program is its reward (agent.command)")


class Reward(Verdict):
    async def serve(self, *words: str) -> None:
        try:
            self.registry.end(self.session, programs.result(self.content()))
        except programs.BadReward as error:
            raise ApiError(400, str(error), param="reward") from error
        self.reply({})


class Fail(Verdict):
    async def serve(self, *words: str) -> None:
        asked = self.known(FailBody)
        self.registry.fail(self.session, f"the service failed: {asked.reason[: programs.SHOWN]}")
        self.reply({})


class HealthCheck(Handler):
    methods = ("GET",)

    def admit(self, key: str) -> None:
        pass

    async def serve(self, *words: str) -> None:
        self.reply({"status": "ok"})


class Nothing(Handler):
    def admit(self, key: str) -> None:
        raise ApiError(404, "there is nothing at this address")


ROUTES = [
    ("/v1/chat/completions", ChatCompletions), ("/v1/completions", TextCompletions),
    ("/v1/models", Models), ("/v1/models/(.+)", Models),
    ("/sessions/next", Next), ("/sessions/reward", Reward), ("/sessions/fail", Fail), ("/health", HealthCheck),
]  # fmt: skip


async def serve(link: socket.socket, settings: GatewaySettings, rest: bytes) -> None:
    """Serve until the trainer closes the link."""
    reader, writer = await asyncio.open_connection(sock=link, limit=LINE_BYTES)
    reader.feed_data(rest)

    def send(event: dict[str, Any]) -> None:
        writer.write(json.dumps(event).encode() + b"\n")

    registry = SessionRegistry(settings, send)
    application = Application(ROUTES, default_handler_class=Nothing, registry=registry)
    body_s = BODY_S + settings.max_request_bytes / SLOWEST_LINK
    # All programs of a host share one address.
    entrance = Entrance(application, largest_body=2**62, body_s=body_s, strangers_per_address=STRANGERS)
    entrance.open(socket.socket(fileno=settings.listener))

    async def execute() -> None:
        with suppress(ConnectionError):  # the trainer was killed before it read all events
            while line := await reader.readline():
                registry.execute(json.loads(line))

    async def ping() -> None:
        while True:
            send({"kind": "alive"})
            await asyncio.sleep(PING_S)

    pings, orders = asyncio.ensure_future(ping()), asyncio.ensure_future(execute())
    await asyncio.wait([orders])
    registry.close()
    if left := asyncio.all_tasks() - {asyncio.current_task(), pings}:
        await asyncio.wait(left, timeout=END_S)
    orders.result()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # from a terminal or a batch system; the trainer decides when to end
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="%(asctime)s gateway: %(message)s")
    logging.getLogger("tornado").setLevel(logging.ERROR)
    link = socket.socket(fileno=os.dup(0))
    first = b""
    while b"\n" not in first:
        received = link.recv(2**16)
        if not received:
            return
        first += received
    line, _, rest = first.partition(b"\n")
    settings = GatewaySettings.of(json.loads(line))
    os.set_inheritable(settings.listener, False)
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)
    asyncio.run(serve(link, settings, rest))
    os._exit(0)


if __name__ == "__main__":
    main()
