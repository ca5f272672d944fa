"""The PyTriton binding: hands arrays to the service, turns errors into answers, and puts the front door before Triton.

With ``batching=False`` every request is computed alone, so that its answer never depends on other requests; ``strict=True``
checks every output's dtype and shape. Each endpoint has its own thread, so ``critic_status`` answers while ``critic_train`` runs.
"""

import contextlib
import json
import logging
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from pytriton.model_config import ModelConfig, Tensor  # type: ignore[import-untyped]
from tenacity import Retrying, stop_after_attempt

from nemo_style_rlhf.critic_service import front_door, protocol
from nemo_style_rlhf.critic_service.backend import Backend, error_tensor, within
from nemo_style_rlhf.critic_service.protocol import Array, Code, Endpoint, ProtocolError, TensorSpec
from nemo_style_rlhf.critic_service.secret import LOOPBACK, own_token_made, read_token
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.critic import ServerConfig

LOGGER = logging.getLogger(__name__)
PORT_CLOSE_TIMEOUT_S = 15.0
BACKLOG = 1024
Handler = Callable[[str, Mapping[str, Array]], dict[str, Array]]


@dataclass(frozen=True)
class Address:
    """The address at which a server will listen, and the secret that callers need."""

    listener: socket.socket | None
    """Socket of the public port, bound and not yet listening; None on all ranks but the first."""
    token: str


def preflight(config: ServerConfig) -> Address:
    """Check all settings that can be checked before a model loads, and take the port.

    Raises:
        UserError: the address needs a token and has none, the port is in use, certificates do not load, or NumPy is 2.
    """
    _refuse_numpy_2()
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


class Binding:
    """Triton bound to ``handle``, and the front door before it.

    :attr:`fatal` is set when an internal error of this process prevented an answer.
    """

    def __init__(
        self, config: ServerConfig, handle: Handler, address: Address, *, roles: list[str], boot_id: str
    ) -> None:
        """Start Triton, bind the endpoints of ``roles``, open the front door."""
        assert address.listener is not None
        self.host, self.port = address.listener.getsockname()[:2]
        scheme = "http" if config.tls.certificate is None else "https"
        self.url = f"{scheme}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"
        self.fatal = threading.Event()
        self._handle = handle
        self._boot_id = boot_id
        self._door: subprocess.Popen[bytes] | None = None
        # Each of these happened once: Triton listened but never answered; one of its processes crashed while loading.
        Retrying(stop=stop_after_attempt(2), reraise=True)(self._start, config, roles)
        self._open(config, address.listener, roles, address.token)

    def _start(self, config: ServerConfig, roles: list[str]) -> None:
        self._backend = Backend(metrics=config.metrics, verbose=config.verbose)
        for endpoint in _endpoints(roles):
            self._bind(endpoint, roles)
        try:
            self._backend.start()
        except Exception:
            LOGGER.error("tritonserver did not start:\n%s", self.log_tail())
            self.close(timeout_s=1.0)
            raise

    def _open(self, config: ServerConfig, listener: socket.socket, roles: list[str], token: str) -> None:
        settings = front_door.Settings(
            listener=listener.fileno(),
            token=token,
            triton=str(self._backend.socket),
            metrics=str(self._backend.metrics_socket) if config.metrics else None,
            endpoints=[endpoint.name for endpoint in _endpoints(roles)],
            max_request_bytes=config.max_request_bytes,
            **asdict(config.tls),
        )
        try:
            listener.listen(BACKLOG)
        except OSError as error:
            raise _cannot_bind(self.host, self.port) from error
        self._door = subprocess.Popen(
            [sys.executable, "-m", front_door.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        )
        assert self._door.stdin is not None and self._door.stdout is not None
        self._door.stdin.write(json.dumps(asdict(settings)).encode() + b"\n")
        self._door.stdin.flush()
        if not self._door.stdout.readline():
            raise RuntimeError("the front door did not open; its log is above")
        listener.close()

    def log_tail(self) -> str:
        """The end of Triton's own log."""
        return self._backend.log_tail()

    @property
    def alive(self) -> bool:
        """False once the front door, one of Triton's processes or a thread that answers requests has died."""
        return self._door is not None and self._door.poll() is None and self._backend.is_alive()

    def close(self, timeout_s: float) -> None:
        """Close the front door, by force after ``timeout_s`` seconds, and stop Triton."""
        if self._door is not None and self._door.stdin is not None:
            with contextlib.suppress(OSError):
                self._door.stdin.close()  # the door delivers finished answers, and ends
            try:
                self._door.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._door.kill()
        self._backend.close()

    def _bind(self, endpoint: Endpoint, roles: list[str]) -> None:
        outputs = [spec for spec in endpoint.outputs if spec is not protocol.REWARDS or "reward" in roles]

        def infer(requests: list[Any]) -> list[dict[str, Array]]:
            return [self._answer(endpoint.name, request) for request in requests]

        self._backend.bind(
            model_name=endpoint.name,
            infer_func=infer,
            inputs=[_tensor(spec) for spec in endpoint.inputs],
            outputs=[_tensor(spec) for spec in (*outputs, protocol.ERROR)],
            config=ModelConfig(batching=False),
            strict=True,
        )

    def _answer(self, endpoint: str, request: Any) -> dict[str, Array]:
        headers = {str(name).lower(): str(value) for name, value in (request.parameters or {}).items()}
        try:
            self._require_boot(headers)
            return self._handle(endpoint, request.data)
        except ProtocolError as error:
            if error.fatal:
                LOGGER.error("%s: %s", endpoint, error)
                self.fatal.set()
            return {protocol.ERROR.name: error_tensor(error.code, str(error))}
        except Exception:
            LOGGER.exception("%s failed, the server ends", endpoint)
            self.fatal.set()
            text = str(ProtocolError(Code.INTERNAL, f"{endpoint} failed and the server ends; its log says why"))
            return {protocol.ERROR.name: error_tensor(Code.INTERNAL, text)}

    def _require_boot(self, headers: Mapping[str, str]) -> None:
        expected_boot = headers.get(protocol.BOOT_HEADER, self._boot_id)
        if expected_boot != self._boot_id:
            raise ProtocolError(
                Code.RESTARTED,
                f"the server restarted: its boot id is {self._boot_id}, the request expects {expected_boot[:40]}",
            )


def _endpoints(roles: list[str]) -> list[Endpoint]:
    """The endpoints of a server with these roles; an unused Triton model would cost start-up time."""
    return [endpoint for endpoint in protocol.ENDPOINTS if endpoint.role is None or endpoint.role in roles]


def _tensor(spec: TensorSpec) -> Any:
    dtype = bytes if spec.datatype == "BYTES" else spec.dtype
    return Tensor(name=spec.name, dtype=dtype, shape=(-1 if spec.size is None else spec.size,))


def _refuse_numpy_2() -> None:
    if int(np.__version__.split(".")[0]) >= 2:
        raise UserError(
            f"NumPy {np.__version__} is installed, but PyTriton 0.7 returns empty tensors with NumPy 2: "
            "run the server in the environment that `make envs` builds (.venv-server)"
        )


def take_port(host: str, port: int) -> socket.socket:
    """Bind the port. Tries for a while, since a server that was just told to stop may still hold it."""
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise UserError(f"server.host={host} is no address of this host ({error}): give one, e.g. 127.0.0.1") from error
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

    if not within(PORT_CLOSE_TIMEOUT_S, bound):
        raise _cannot_bind(host, port)
    return sockets[0]


def _cannot_bind(host: str, port: int) -> UserError:
    return UserError(
        f"server.port={port} on {host} cannot be bound: stop what listens there, or choose another port (0 = a free one)"
    )
