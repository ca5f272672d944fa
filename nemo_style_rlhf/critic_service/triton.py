"""``server.backend=pytriton``: PyTriton answers the endpoints that take tensors, this process's backend the JSON endpoints.

With ``batching=False`` every request is computed separately, so that its answer never depends on other requests; ``strict=True``
checks every output's dtype and shape.
"""

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
from pytriton.model_config import ModelConfig, Tensor  # type: ignore[import-untyped]
from tenacity import Retrying, stop_after_attempt

from nemo_style_rlhf.critic_service.backend import Backend, error_tensor, require_libraries
from nemo_style_rlhf.critic_service.binding import Binding, Handler
from nemo_style_rlhf.critic_service.protocol import largest_tensors
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.critic import CriticServerConfig
from nemo_style_rlhf.wire import messages
from nemo_style_rlhf.wire.listening import Address, FrontDoorProcess
from nemo_style_rlhf.wire.messages import Array, Code, Endpoint, ProtocolError, TensorSpec

LOGGER = logging.getLogger(__name__)


def require_numpy_1() -> None:
    """Raise :class:`UserError` if NumPy is 2."""
    if int(np.__version__.split(".")[0]) >= 2:
        raise UserError(
            f"NumPy {np.__version__} is installed, but PyTriton 0.7 returns empty tensors with NumPy 2: run the server in the "
            "environment that `make envs` builds (.venv-server), or give server.backend=native"
        )


class TritonBinding(Binding):
    """Triton starts while the models load. Endpoints that take only JSON do without it: each would add two processes and half a
    second of processor time to a server's start."""

    def __init__(self, config: CriticServerConfig, address: Address, roles: list[str]) -> None:
        super().__init__(config, address, roles)
        self._tensors = [each for each in self.endpoints if largest_tensors(each, 1)]
        self._fatal = threading.Event()
        self._handle: Handler | None = None
        self._boot_id = ""
        self._backend: Backend | None = None
        self._ready: Future[None] = Future()
        self._lock = threading.Lock()
        self._closed = False

    @staticmethod
    def require_host() -> None:
        require_libraries()

    def start(self) -> None:
        """Start Triton, in a thread."""
        logging.getLogger("pytriton").setLevel(logging.INFO if self._config.verbose else logging.ERROR)
        self._backend = self._bound()
        threading.Thread(target=self._start, name="triton", daemon=True).start()

    def _start(self) -> None:
        try:
            # Each of these happened once: Triton listened but never answered; one of its processes crashed while loading.
            Retrying(stop=stop_after_attempt(2), reraise=True)(self._attempt)
        except Exception as error:  # noqa: BLE001 raised by open()
            self._ready.set_exception(error)
        else:
            self._ready.set_result(None)

    def _attempt(self) -> None:
        with self._lock:
            if self._closed:
                return
            backend = self._backend = self._backend or self._bound()
            backend.launch()
        try:
            backend.wait_until_ready()
        except Exception:
            with self._lock:
                if not self._closed:
                    LOGGER.error("tritonserver did not start:\n%s", backend.log_tail())
                    backend.close()
                    self._backend = None
            raise

    def _bound(self) -> Backend:
        backend = Backend(metrics=self._config.metrics, verbose=self._config.verbose)
        for endpoint in self._tensors:
            self._bind(backend, endpoint)
        return backend

    def open(self, handle: Handler, *, boot_id: str) -> FrontDoorProcess:
        """Open the front door once Triton is ready: from now on requests reach ``handle``.

        Raises:
            TimeoutError: Triton does not start.
            UserError: another server has taken the port.
        """
        self._ready.result()
        self._handle, self._boot_id = handle, boot_id
        backend = self._backend
        assert backend is not None
        others = dict.fromkeys(self._tensors, str(backend.socket))
        return self._open(backend.folder / "control.sock", others, handle, boot_id, metrics=backend.metrics_socket)

    @property
    def failed(self) -> bool:
        return self._fatal.is_set() or super().failed

    @property
    def alive(self) -> bool:
        return super().alive and self._backend is not None and self._backend.is_alive()

    def why_dead(self) -> str:
        assert self._backend is not None
        return (
            f"the front door, tritonserver or a process of its died, or a socket was removed from {self._backend.folder}; "
            f"the last lines of Triton's log:\n{self._backend.log_tail()}"
        )

    def close(self, timeout_s: float) -> None:
        super().close(timeout_s)
        with self._lock:
            self._closed = True
            if self._backend is not None:
                self._backend.close()

    def _bind(self, backend: Backend, endpoint: Endpoint) -> None:
        def infer(requests: list[Any]) -> list[dict[str, Array]]:
            return [self._answer(endpoint.name, request) for request in requests]

        backend.bind(
            model_name=endpoint.name,
            infer_func=infer,
            inputs=[_tensor(spec) for spec in endpoint.inputs],
            outputs=[_tensor(spec) for spec in (*self.served(endpoint).outputs, messages.ERROR)],
            config=ModelConfig(batching=False),
            strict=True,
        )

    def _answer(self, endpoint: str, request: Any) -> dict[str, Array]:
        headers = {str(name).lower(): str(value) for name, value in (request.parameters or {}).items()}
        try:
            self._require_boot(headers)
            assert self._handle is not None  # the front door opens after it is set
            return self._handle(endpoint, request.data)
        except ProtocolError as error:
            if error.fatal:
                LOGGER.error("%s: %s", endpoint, error)
                self._fatal.set()
            return {messages.ERROR.name: error_tensor(error.code, str(error))}
        except Exception:
            LOGGER.exception("%s failed, the server ends", endpoint)
            self._fatal.set()
            text = str(ProtocolError(Code.INTERNAL, f"{endpoint} failed and the server ends; its log says why"))
            return {messages.ERROR.name: error_tensor(Code.INTERNAL, text)}

    def _require_boot(self, headers: Mapping[str, str]) -> None:
        expected_boot = headers.get(messages.BOOT_HEADER, self._boot_id)
        if expected_boot != self._boot_id:
            raise ProtocolError(
                Code.RESTARTED,
                f"the server restarted: its boot id is {self._boot_id}, the request expects {expected_boot[:40]}",
            )


def _tensor(spec: TensorSpec) -> Any:
    dtype = bytes if spec.datatype == "BYTES" else spec.dtype
    return Tensor(name=spec.name, dtype=dtype, shape=(-1 if spec.size is None else spec.size,))
