"""``ServerClient``: the requests that all our servers share. Needs requests, rich and NumPy, but neither torch nor PyTriton.
``connection`` below it makes one request; ``remote_critic`` and ``remote_reward`` add the requests of each server.
"""

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, TypeVar

from rich.console import Console
from rich.live import Live
from rich.text import Text

from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.critic_service.protocol import Status
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.remote_critic import RemoteCriticConfig
from nemo_style_rlhf.wire import messages
from nemo_style_rlhf.wire.connection import Connection, ServerAbsent, ServerUnreachable
from nemo_style_rlhf.wire.messages import Array, Endpoint
from nemo_style_rlhf.wire.secret import LOOPBACK, own_token, read_token

STATUS_TIMEOUT_S = 10.0
POLL_PERIOD_S = 0.5
TOLD_AFTER_S = (0.0, 60.0, 120.0, 300.0, 600.0)
"""Seconds of waiting for a server before each line in a log file; then every 10 minutes. A terminal has a line that updates."""
INFER_THREADS = 2
"""One request computes while the next one is sent. The server computes one at a time."""


class ServerClient:
    """Client of one server. Safe to use from several threads; close it, or use it as a context manager.

    Calls raise as :meth:`Connection.call`. If a call returns a future, the future raises.
    """

    def __init__(self, config: RemoteCriticConfig) -> None:
        self._config = config
        token = read_token(config.token) or (own_token() if config.host in LOOPBACK else None)
        self._connection = Connection(
            config.host, config.port, token=token, retries=config.retries, peer=config.peer, tls=config.tls
        )
        self._infer_pool = infer_pool()

    def __enter__(self: "Client") -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        return self._connection.address

    @property
    def where(self) -> str:
        """The server's name in errors."""
        return f"the {self._config.peer.name} at {self._connection.address}"

    def status(self, *, retry: bool = True) -> Status:
        """Return the server's status. Raise :class:`UserError` if it speaks another version of the protocol."""
        answer = parse_json(self._connection.call(protocol.STATUS, {}, timeout_s=STATUS_TIMEOUT_S, retry=retry))
        if (spoken := answer["protocol_version"]) != protocol.PROTOCOL_VERSION:  # another has other fields
            raise UserError(
                f"{self.where} speaks protocol version {spoken}, this client {protocol.PROTOCOL_VERSION}: "
                "install the same version of nemo_style_rlhf on both sides"
            )
        return Status(**answer)

    def answers(self) -> bool:
        """Return True if the server answers already.

        Raises:
            UserError: a wrong token, or something else answers.
        """
        try:
            self.status(retry=False)
        except ServerUnreachable:
            return False
        return True

    def wait_until_ready(self, progress: Callable[[str], None], heed: Callable[[], None] = lambda: None) -> Status:
        """Call :func:`wait_for_any` for this server."""
        return wait_for_any([self], progress, heed)[self]

    def require_rewards(self, status: Status) -> None:
        """Raise :class:`UserError` if the server has no reward model."""
        if "reward" not in status.roles:
            raise UserError(
                f"{self.where} serves {', '.join(status.roles)}, the actor needs reward too: start it with "
                "reward_model.combine_rm_and_critic_server=true, or name a servers/serve_reward_model.py in reward.server"
            )

    def close(self) -> None:
        """End running calls and close the connections; the server keeps running."""
        self._connection.close()
        self._infer_pool.shutdown(cancel_futures=True)

    def _ask(self, endpoint: Endpoint, content: dict[str, Any]) -> dict[str, Any]:
        inputs = {messages.REQUEST.name: messages.json_tensor(content)}
        return parse_json(self._connection.call(endpoint, inputs, timeout_s=self._config.train_timeout_base_s))

    def _ask_once(self, endpoint: Endpoint, content: dict[str, Any]) -> dict[str, Any]:
        """Ask with a request id, so that only the first delivered attempt counts."""
        return self._ask(endpoint, content | {"request_id": secrets.token_hex(16)})


Client = TypeVar("Client", bound=ServerClient)


def wait_for_any(
    servers: Sequence[Client], progress: Callable[[str], None], heed: Callable[[], None] = lambda: None
) -> dict[Client, Status]:
    """Poll until at least one of the servers answers, and return those that do.

    Args:
        progress: receives a line now and then; on a terminal, a line updates in place instead.
        heed: called after each poll without an answer; an exception from it ends the wait.

    Raises:
        ServerAbsent: none answers within the first one's ``wait_for_server_s``.
        UserError: a wrong token, or something else answers.
    """
    config, where = servers[0]._config, " or ".join(server.where for server in servers)
    started, told = time.monotonic(), 0
    terminal = Live(console=Console(stderr=True), transient=True, auto_refresh=False)
    with terminal if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0" else nullcontext() as shown:
        while True:
            answers = {}
            for server in servers:
                try:
                    answers[server] = server.status(retry=False)
                except ServerUnreachable as error:
                    last = error
            if answers:
                return answers
            heed()
            waited, limit = time.monotonic() - started, config.wait_for_server_s
            if waited >= limit:
                raise ServerAbsent(f"{last} (waited {waited:.0f} s, {config.peer.section}.wait_for_server_s)") from last
            line = f"waiting for {where}, {limit - waited:.0f} s left; start it with {config.peer.command(config.port)}"
            if shown is not None:
                shown.update(Text(line), refresh=True)
            elif waited >= _told_after(told):
                told += 1
                progress(line)
            time.sleep(POLL_PERIOD_S)


def _told_after(times: int) -> float:
    """Seconds of waiting before the next progress line, after ``times`` lines."""
    last = len(TOLD_AFTER_S) - 1
    return TOLD_AFTER_S[min(times, last)] + max(times - last, 0) * TOLD_AFTER_S[-1]


def infer_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(INFER_THREADS, thread_name_prefix="critic-infer")


def split(sizes: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Yield consecutive rows whose tensors, of ``sizes`` bytes, fit into one request. The small JSON plan is not counted."""
    rows: list[int] = []
    total = 0
    for row, size in enumerate(sizes):
        if rows and total + size > limit:
            yield rows
            rows, total = [], 0
        rows.append(row)
        total += size
    if rows:
        yield rows


def parse_json(answer: dict[str, Array]) -> dict[str, Any]:
    """Parse the JSON object of an answer."""
    content = json.loads(answer[messages.RESPONSE.name].item(0))
    assert isinstance(content, dict)
    return content
