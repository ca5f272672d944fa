"""The binding of a service to the network: PyTriton for tensors, a backend of this process for JSON, the front door before both.

With ``batching=False`` every request is computed alone, so that its answer never depends on other requests; ``strict=True``
checks every output's dtype and shape. Each endpoint has its own thread, so ``critic_status`` answers while ``critic_train`` runs.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from pytriton.model_config import ModelConfig, Tensor  # type: ignore[import-untyped]
from tenacity import Retrying, stop_after_attempt

from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.critic_service.backend import Backend, error_tensor, require_libraries
from nemo_style_rlhf.critic_service.protocol import largest_tensors
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.common import RunConfig
from nemo_style_rlhf.schema.critic import ServerConfig
from nemo_style_rlhf.transport import messages
from nemo_style_rlhf.transport.front_door import Route
from nemo_style_rlhf.transport.listening import Address, Door, take_address
from nemo_style_rlhf.transport.messages import Array, Code, Endpoint, ProtocolError, TensorSpec
from nemo_style_rlhf.transport.unix_backend import UnixBackend

LOGGER = logging.getLogger(__name__)
CALLS_IN_MEMORY = 32
"""Maximum number of calls of the largest size that Triton may hold at once."""
Handler = Callable[[str, Mapping[str, Array]], dict[str, Array]]


def begin(run: RunConfig, config: ServerConfig, roles: list[str]) -> "Binding | None":
    """:func:`take_address` in an environment in which PyTriton works, and start Triton, which loads beside the models. A
    rehearsal does without it. Returns None on ranks that serve nothing.

    Raises:
        UserError: NumPy is 2, a library is missing; or see :func:`take_address`.
    """
    _refuse_numpy_2()
    address = take_address(config)
    if address.listener is None:
        return None
    require_libraries()
    binding = Binding(config, address, roles)
    if not run.dry_run:
        binding.start()
    return binding


class Binding:
    """Triton and a backend of this process bound to a handler, and the front door before them. Nobody reaches them before
    :meth:`open`.

    Triton serves the endpoints that take tensors. Those that take only JSON need none of it: each would cost a server's start two
    processes more, half a second of processor time.
    """

    def __init__(self, config: ServerConfig, address: Address, roles: list[str]) -> None:
        self._fatal = threading.Event()
        self._control: UnixBackend | None = None
        self.door: Door | None = None
        self._config, self._address, self._roles = config, address, roles
        self._handle: Handler | None = None
        self._boot_id = ""
        self._backend: Backend | None = None
        self._ready: Future[None] = Future()
        self._lock = threading.Lock()
        self._closed = False

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
        for endpoint in _endpoints(self._roles):
            if largest_tensors(endpoint, 1):
                self._bind(backend, endpoint)
        return backend

    def open(self, handle: Handler, *, boot_id: str) -> Door:
        """Open the front door once Triton is ready: from now on requests reach ``handle``.

        Raises:
            TimeoutError: Triton does not start.
            UserError: another server has taken the port.
        """
        self._ready.result()
        self._handle, self._boot_id = handle, boot_id
        backend, config = self._backend, self._config
        assert backend is not None
        # Triton and both ends of its shared memory keep room for the largest request that each endpoint has seen.
        sizes = {each: largest_tensors(each, config.max_request_bytes) for each in protocol.ENDPOINTS}
        control = backend.folder / "control.sock"
        routes = [Route(each, sizes[each], None if sizes[each] else str(control)) for each in _endpoints(self._roles)]
        self._control = UnixBackend(
            control, [route for route in routes if route.backend], handle, boot_id=boot_id, one_at_a_time=True
        )
        self.door = Door(
            config,
            self._address,
            backend=backend.socket,
            metrics=backend.metrics_socket,
            routes=routes,
            bytes_in_flight=CALLS_IN_MEMORY * max(Route(each, size).largest_body for each, size in sizes.items()),
        )
        return self.door

    @property
    def failed(self) -> bool:
        """Whether an internal error of this process prevented an answer."""
        return self._fatal.is_set() or (self._control is not None and self._control.fatal.is_set())

    @property
    def folder(self) -> Path:
        """Where its sockets are."""
        assert self._backend is not None
        return self._backend.folder

    def log_tail(self) -> str:
        """The end of Triton's own log."""
        assert self._backend is not None
        return self._backend.log_tail()

    @property
    def alive(self) -> bool:
        """False once the front door, a process of Triton, a thread that answers requests or a socket is gone."""
        if self.door is None or self._backend is None or self._control is None:
            return False
        return self.door.alive and self._control.alive and self._backend.is_alive()

    def close(self, timeout_s: float) -> None:
        """Close the front door, by force after ``timeout_s`` seconds, and stop Triton, which may still be starting."""
        if self.door is not None:
            self.door.close(timeout_s)
        if self._control is not None:
            self._control.close()
        with self._lock:
            self._closed = True
            if self._backend is not None:
                self._backend.close()

    def _bind(self, backend: Backend, endpoint: Endpoint) -> None:
        outputs = [spec for spec in endpoint.outputs if spec is not protocol.REWARDS or "reward" in self._roles]

        def infer(requests: list[Any]) -> list[dict[str, Array]]:
            return [self._answer(endpoint.name, request) for request in requests]

        backend.bind(
            model_name=endpoint.name,
            infer_func=infer,
            inputs=[_tensor(spec) for spec in endpoint.inputs],
            outputs=[_tensor(spec) for spec in (*outputs, messages.ERROR)],
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


def _endpoints(roles: list[str]) -> list[Endpoint]:
    """The endpoints of a server with these roles; an unused Triton model would cost start-up time."""
    return [endpoint for endpoint in protocol.ENDPOINTS if not endpoint.roles or {*endpoint.roles} & {*roles}]


def _tensor(spec: TensorSpec) -> Any:
    dtype = bytes if spec.datatype == "BYTES" else spec.dtype
    return Tensor(name=spec.name, dtype=dtype, shape=(-1 if spec.size is None else spec.size,))


def _refuse_numpy_2() -> None:
    if int(np.__version__.split(".")[0]) >= 2:
        raise UserError(
            f"NumPy {np.__version__} is installed, but PyTriton 0.7 returns empty tensors with NumPy 2: "
            "run the server in the environment that `make envs` builds (.venv-server)"
        )
