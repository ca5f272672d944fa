"""A server's public end: its checks and its port before it loads, and the front door of its backend."""

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.processes.child import ChildProcess
from nemo_style_rlhf.schema.critic import ServerConfig
from nemo_style_rlhf.wire import front_door
from nemo_style_rlhf.wire.front_door import Route
from nemo_style_rlhf.wire.secret import LOOPBACK, own_token_made, read_token

PORT_CLOSE_TIMEOUT_S = 15.0
BACKLOG = 1024
CLOSE_S = 2.0
"""Seconds that a front door has to deliver finished answers once its server has gone."""


@dataclass(frozen=True)
class Address:
    """The address at which a server will listen, and the secret that callers need."""

    listener: socket.socket | None
    """Socket of the public port, bound and not yet listening; None on all ranks but the first."""
    token: str


def take_address(config: ServerConfig) -> Address:
    """Check all settings that can be checked before a model loads, and take the port.

    Raises:
        UserError: the address needs a token and has none, the port is in use, or certificates do not load.
    """
    token = read_token(config.token)
    if config.host not in LOOPBACK and token is None:
        raise UserError(
            f"server.host={config.host} would open the server to the network without a token: set "
            f"server.token.token_file or the environment variable {config.token.token_env}, or bind 127.0.0.1"
        )
    if config.tls.certificate is not None:
        try:
            front_door.tls_context(**asdict(config.tls))
        except (OSError, ssl.SSLError) as error:
            raise UserError(
                f"server.tls does not load ({error}): expected PEM files: certificate and chain, private key without a "
                "passphrase, and for mutual TLS the client_ca"
            ) from error
    first = os.environ.get("RANK", "0") == "0"  # only the first rank has a front door
    return Address(take_port(config.host, config.port) if first else None, token or own_token_made())


class FrontDoorProcess:
    """The process of a front door. It ends with this one."""

    def __init__(
        self,
        config: ServerConfig,
        address: Address,
        *,
        backend: Path,
        metrics: Path | None,
        routes: Sequence[Route],
        bytes_in_flight: int,
        afterwards: Sequence[str] = (),
    ) -> None:
        """Open a front door at ``address`` for a backend that listens already; see :class:`front_door.FrontDoorSettings`.

        Args:
            afterwards: a command to run if this process ends without closing the door.

        Raises:
            UserError: another server has taken the port.
        """
        listener = address.listener
        assert listener is not None
        self.host, self.port = listener.getsockname()[:2]
        scheme = "http" if config.tls.certificate is None else "https"
        self.url = f"{scheme}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"
        settings = front_door.FrontDoorSettings(
            listener=listener.fileno(),
            token=address.token,
            backend=str(backend),
            metrics=None if metrics is None else str(metrics),
            routes=tuple(routes),
            bytes_in_flight=bytes_in_flight,
            **asdict(config.tls),
        )
        try:
            listener.listen(BACKLOG)
        except OSError as error:
            raise _cannot_bind(self.host, self.port) from error
        self._process = ChildProcess(
            [sys.executable, "-m", front_door.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            grace_s=CLOSE_S,
            afterwards=afterwards,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(settings.to_json() + b"\n")
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise RuntimeError("the front door did not open; its log is above")
        listener.close()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self, timeout_s: float) -> None:
        """Close the front door, by force after ``timeout_s`` seconds."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGTERM)  # the door ignores it: its supervisor need not look for our end
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # the door delivers finished answers, and ends
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()


def take_port(
    host: str, port: int, *, prefix: str = "server.", patience_s: float = PORT_CLOSE_TIMEOUT_S
) -> socket.socket:
    """Bind the port. Tries for ``patience_s`` seconds, since a server that was just told to stop may still hold it.

    Args:
        prefix: prefix of the user's keys ``host`` and ``port``, for errors.

    Raises:
        UserError: the port is in use, or the host has no such address.
    """
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise UserError(
            f"{prefix}host={host} is no address of this host ({error}): give one, e.g. 127.0.0.1"
        ) from error
    family, kind, _, _, address = min(addresses, key=lambda each: each[0] != socket.AF_INET)  # clients write 127.0.0.1
    sockets: list[socket.socket] = []

    def bound() -> bool:
        sockets.append(socket.socket(family, kind))
        sockets[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            with socket.socket(family, kind) as probe:  # two sockets that do not listen yet may share a port
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen(1)
            sockets[-1].bind(address)
        except OSError:
            sockets.pop().close()
        return bool(sockets)

    if not within(patience_s, bound):
        raise _cannot_bind(host, port, prefix)
    return sockets[0]


def _cannot_bind(host: str, port: int, prefix: str = "server.") -> UserError:
    return UserError(
        f"{prefix}port={port} on {host} cannot be bound: stop what listens there, or choose another port (0 = a free one)"
    )


def within(timeout_s: float, condition: Callable[[], bool]) -> bool:
    """Wait up to ``timeout_s`` seconds until ``condition`` holds. Return False if it never did."""
    waiting = Retrying(
        retry=retry_if_result(lambda holds: not holds),
        stop=stop_after_delay(timeout_s),
        wait=wait_fixed(0.1),
        retry_error_callback=lambda _: False,
    )
    return bool(waiting(condition))
