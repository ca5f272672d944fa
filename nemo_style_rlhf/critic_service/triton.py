"""The PyTriton binding: checks the token, hands arrays to the service, turns errors into answers, binds the door.

With ``batching=False`` a request is computed alone, so an answer never depends on who else asked; ``strict=True`` checks
every output's dtype and shape. Each endpoint has its own thread, so ``critic_status`` answers while ``critic_train`` runs.
"""

import contextlib
import hmac
import logging
import os
import shutil
import signal
import socket
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytriton.triton  # type: ignore[import-untyped]
from pytriton.model_config import ModelConfig, Tensor  # type: ignore[import-untyped]
from pytriton.triton import Triton, TritonConfig
from tenacity import Retrying, retry_if_result, stop_after_attempt, stop_after_delay, wait_fixed

from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.critic_service.protocol import Array, Code, Endpoint, ProtocolError, TensorSpec
from nemo_style_rlhf.critic_service.pytriton_model import ModelWithCleanErrors, error_tensor
from nemo_style_rlhf.critic_service.secret import read_token
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.critic import ServerConfig

LOGGER = logging.getLogger(__name__)
LOOPBACK = ("127.0.0.1", "localhost")
PORT_CLOSE_TIMEOUT_S = 15.0
HANG_UP_TIMEOUT_S = 12
"""Triton that has lost this process waits so long for clients to close their connections, and holds the port: for less time than
the next server waits for that."""
LOG_TAIL_LINES = 20
Handler = Callable[[str, Mapping[str, Array]], dict[str, Array]]


def preflight(config: ServerConfig) -> str | None:
    """Everything that can be refused before a model loads; returns the token.

    Raises:
        UserError: an address that needs a token and has none, a port in use, NumPy 2.
    """
    _refuse_numpy_2()
    token = read_token(config.token)
    if config.host not in LOOPBACK and token is None:
        raise UserError(
            f"server.host={config.host} would open the server to the network without a token: set "
            f"server.token.token_file or the environment variable {config.token.token_env}, or bind 127.0.0.1"
        )
    if config.port and os.environ.get("RANK", "0") == "0":  # of several ranks the first has the door
        _wait_for_port(config.host, config.port)
    return token


class Door:
    """Triton bound to ``handle``; :attr:`fatal` is set when an answer could not be given for a fault of this process."""

    def __init__(
        self, config: ServerConfig, handle: Handler, *, roles: list[str], boot_id: str, token: str | None
    ) -> None:
        """Start Triton and bind the endpoints of ``roles``; :func:`preflight` comes first."""
        self.host = config.host
        self.port = config.port or _free_port(config.host)
        self.fatal = threading.Event()
        self._handle = handle
        self._boot_id = boot_id
        self._token = None if token is None else token.encode()
        _let_stub_find_libpython()
        _remove_segments(lambda pid: not psutil.pid_exists(pid))  # of servers that were killed: 50 MB each
        pytriton.triton.Model = ModelWithCleanErrors
        # Seen, once each: it listened and never answered; a process of its crashed while it loaded.
        Retrying(stop=stop_after_attempt(2), reraise=True)(self._start, config, roles)

    def _start(self, config: ServerConfig, roles: list[str]) -> None:
        _wait_for_port(self.host, self.port)
        self._tritons: list[psutil.Process] = []
        self._workspace = Path(tempfile.mkdtemp(prefix="critic_triton_"))
        self._log = None if config.verbose else self._workspace / "triton.log"
        self._triton = Triton(
            config=_triton_config(config, self.port, self._log), workspace=self._workspace / "pytriton"
        )
        # Triton would start every model twice, the first time only to ask it for the configuration it is given anyway.
        self._triton._triton_server_config["strict_model_config"] = True
        for endpoint in protocol.ENDPOINTS:
            if endpoint.role is None or endpoint.role in roles:  # a Triton model that nobody asks costs start-up time
                self._bind(endpoint, roles)
        try:
            self._triton.run()
        except Exception:
            LOGGER.error("tritonserver did not start:\n%s", self.log_tail())
            self.close(timeout_s=1.0)
            raise
        self._tritons = psutil.Process(self._tritonserver.pid).children(recursive=True)

    def log_tail(self) -> str:
        """The end of Triton's own log."""
        if self._log is None or not self._log.exists():
            return "(its log is above)"
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])

    @property
    def alive(self) -> bool:
        """False once tritonserver, a process that an endpoint has in it or a thread that answers requests has died."""
        return bool(self._triton.is_alive()) and all(map(_runs, self._tritons))

    def close(self, timeout_s: float) -> None:
        """Take Triton down, by force after ``timeout_s`` seconds, and remove what it left on disk and in shared memory.

        PyTriton's threads, which have nobody to serve any more, are daemons and end with this process.
        """
        # Not Triton.stop: it waits for clients to hang up, and takes half a second per endpoint, one after the other.
        child = self._tritonserver
        if child is not None and child.is_alive():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # it died of itself meanwhile
                self._tritons += psutil.Process(child.pid).children(recursive=True)
                child.process.signal(signal.SIGINT)
                if not _within(timeout_s, lambda: not psutil.pid_exists(child.pid)):
                    child.process.kill()
        # A stub that has answered waits, with Python's lock, for tritonserver to have noted it (ProcessRequests in pb_stub.cc):
        # for ever where that has been killed, as its watch over tritonserver wants the lock before it ends the stub.
        for process in self._tritons:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(self._workspace, ignore_errors=True)
        _remove_segments(lambda pid: pid == os.getpid())

    @property
    def _tritonserver(self) -> Any:
        return self._triton._triton_server._tritonserver_running_cmd

    def _bind(self, endpoint: Endpoint, roles: list[str]) -> None:
        outputs = [spec for spec in endpoint.outputs if spec is not protocol.REWARDS or "reward" in roles]

        def infer(requests: list[Any]) -> list[dict[str, Array]]:
            return [self._answer(endpoint.name, request) for request in requests]

        self._triton.bind(
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
            self._authorise(headers)
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

    def _authorise(self, headers: Mapping[str, str]) -> None:
        if self._token is not None:
            given = headers.get(protocol.TOKEN_HEADER, "").encode()
            if not hmac.compare_digest(given, self._token):
                problem = "is wrong" if given else "is missing"
                raise ProtocolError(Code.UNAUTHORIZED, f"the header {protocol.TOKEN_HEADER} {problem}")
        expected_boot = headers.get(protocol.BOOT_HEADER, self._boot_id)
        if expected_boot != self._boot_id:
            raise ProtocolError(
                Code.RESTARTED,
                f"the server restarted: its boot id is {self._boot_id}, the request expects {expected_boot[:40]}",
            )


def _tensor(spec: TensorSpec) -> Any:
    dtype = bytes if spec.datatype == "BYTES" else spec.dtype
    return Tensor(name=spec.name, dtype=dtype, shape=(-1 if spec.size is None else spec.size,))


def _triton_config(config: ServerConfig, port: int, log: Path | None) -> Any:
    """HTTP at the configured address; no gRPC; metrics on loopback only. PyTriton's own restrictions stay on."""
    return TritonConfig(
        http_address=config.host,
        http_port=port,
        http_header_forward_pattern=protocol.HEADER_PATTERN,
        allow_grpc=False,
        exit_timeout_secs=HANG_UP_TIMEOUT_S,
        log_file=log,
        allow_metrics=config.metrics_port > 0,
        metrics_address="127.0.0.1" if config.metrics_port else None,
        metrics_port=config.metrics_port or None,
        allow_gpu_metrics=False if config.metrics_port else None,
    )


def _refuse_numpy_2() -> None:
    if int(np.__version__.split(".")[0]) >= 2:
        raise UserError(
            f"NumPy {np.__version__} is installed, but PyTriton 0.7 returns empty tensors with NumPy 2: "
            "run the server in the environment that `make envs` builds (.venv-server)"
        )


def _let_stub_find_libpython() -> None:
    """Triton's Python stub loads libpython; with a pyenv or conda interpreter only this variable leads it to the right one."""
    libdir = sysconfig.get_config_var("LIBDIR")
    known = os.environ.get("LD_LIBRARY_PATH", "")
    if libdir and sysconfig.get_config_var("Py_ENABLE_SHARED") and known.split(":")[0] != libdir:
        os.environ["LD_LIBRARY_PATH"] = f"{libdir}:{known}" if known else libdir


def _remove_segments(of: Callable[[int], bool]) -> None:
    """Unlink the shared memory of the Triton servers whose process id ``of`` accepts."""
    for segment in Path("/dev/shm").glob("pytrtion*-*"):
        pid = segment.name.removeprefix("pytrtion").split("-")[0]
        if pid.isdigit() and of(int(pid)):
            with contextlib.suppress(OSError):  # gone already, or another user's
                segment.unlink()


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as listener:
        return int(listener.getsockname()[1])


def _wait_for_port(host: str, port: int) -> None:
    """A server that was just told to stop may still hold the port, and even answer: wait until it is closed."""

    def in_use() -> bool:
        try:
            socket.create_server((host, port)).close()
        except OSError:
            return True
        return False

    if not _within(PORT_CLOSE_TIMEOUT_S, lambda: not in_use()):
        raise UserError(
            f"server.port={port} on {host} cannot be bound: stop what listens there, or choose another port (0 = a free one)"
        )


def _within(timeout_s: float, condition: Callable[[], bool]) -> bool:
    """Whether ``condition`` holds before ``timeout_s`` seconds are over."""
    waiting = Retrying(
        retry=retry_if_result(lambda holds: not holds),
        stop=stop_after_delay(timeout_s),
        wait=wait_fixed(0.1),
        retry_error_callback=lambda _: False,
    )
    return bool(waiting(condition))
