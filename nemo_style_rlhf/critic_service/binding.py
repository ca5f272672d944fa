"""The binding of a service to the network: a backend that calls it, and the front door before that."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from nemo_style_rlhf.critic_service import protocol, runtime_files
from nemo_style_rlhf.critic_service.protocol import largest_tensors
from nemo_style_rlhf.critic_service.runtime_files import RuntimeFiles, remove_those_of_dead_servers
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.common import RunConfig
from nemo_style_rlhf.schema.critic import CriticServerConfig
from nemo_style_rlhf.wire.front_door import Route
from nemo_style_rlhf.wire.listening import Address, FrontDoorProcess, take_address
from nemo_style_rlhf.wire.messages import Array, Endpoint
from nemo_style_rlhf.wire.unix_backend import UnixBackend

CALLS_IN_MEMORY = 32
"""Maximum number of calls of the largest size that the backend may hold at once."""
Handler = Callable[[str, Mapping[str, Array]], dict[str, Array]]


def begin(run: RunConfig, config: CriticServerConfig, roles: list[str]) -> "Binding | None":
    """Take the address and start the backend, to load while the models load. A dry run starts no backend.

    Returns None on ranks that serve nothing.

    Raises:
        UserError: the backend cannot run in this environment; or see :func:`take_address`.
    """
    kind: type[Binding] = Binding
    if config.backend == "pytriton":
        if find_spec("pytriton") is None:
            raise UserError(
                f"{sys.executable} has no pytriton, which server.backend=pytriton needs: run the server in the environment that "
                "`make envs` builds (.venv-server), or give server.backend=native"
            )
        from nemo_style_rlhf.critic_service import triton

        triton.require_numpy_1()
        kind = triton.TritonBinding
    address = take_address(config)
    if address.listener is None:
        return None
    kind.require_host()
    binding = kind(config, address, roles)
    if not run.dry_run:
        binding.start()
    return binding


class Binding:
    """``server.backend=native``: this process answers by itself, on a Unix socket behind the front door.

    Each endpoint has its own thread, so ``critic_status`` answers while ``critic_train`` runs. Its calls are computed one after
    another: no answer depends on other requests. No request arrives before :meth:`open`.
    """

    def __init__(self, config: CriticServerConfig, address: Address, roles: list[str]) -> None:
        self.door: FrontDoorProcess | None = None
        self.endpoints = [each for each in protocol.ENDPOINTS if not each.roles or {*each.roles} & {*roles}]
        """The endpoints of these roles; an unused one would cost start-up time."""
        self._without = () if "reward" in roles else (protocol.REWARDS.name,)
        """Outputs that this server does not have."""
        self._config, self._address = config, address
        self._answering: UnixBackend | None = None
        self._runtime_files: RuntimeFiles | None = None

    @staticmethod
    def require_host() -> None:
        """Raise :class:`UserError` if this host lacks something."""

    def start(self) -> None:
        """Start what can start before the models are loaded.

        Raises:
            UserError: the host does not allow it.
        """
        remove_those_of_dead_servers()
        self._runtime_files = RuntimeFiles()

    def open(self, handle: Handler, *, boot_id: str) -> FrontDoorProcess:
        """Open the front door: from now on requests reach ``handle``.

        Raises:
            UserError: another server has taken the port.
        """
        assert self._runtime_files is not None
        afterwards = [sys.executable, "-m", runtime_files.__name__, self._runtime_files.name]
        return self._open(self._runtime_files.folder / "http.sock", {}, handle, boot_id, afterwards=afterwards)

    def _open(
        self,
        socket: Path,
        others: Mapping[Endpoint, str],
        handle: Handler,
        boot_id: str,
        *,
        metrics: Path | None = None,
        afterwards: Sequence[str] = (),
    ) -> FrontDoorProcess:
        """Answer all endpoints at ``socket``, except ``others`` at the sockets that it names."""
        # Both ends of a connection to a backend keep room for the largest request that each endpoint has seen.
        sizes = {each: largest_tensors(each, self._config.max_request_bytes) for each in protocol.ENDPOINTS}
        routes = {each: Route(self.served(each), sizes[each], others.get(each)) for each in self.endpoints}
        own = [route for each, route in routes.items() if each not in others]
        self._answering = UnixBackend(socket, own, handle, boot_id=boot_id, one_at_a_time=True)
        self.door = FrontDoorProcess(
            self._config,
            self._address,
            backend=socket,
            metrics=metrics,
            routes=list(routes.values()),
            bytes_in_flight=CALLS_IN_MEMORY * max(Route(each, size).largest_body for each, size in sizes.items()),
            afterwards=afterwards,
        )
        return self.door

    def served(self, endpoint: Endpoint) -> Endpoint:
        """The endpoint with the outputs that this server has."""
        return replace(endpoint, outputs=tuple(each for each in endpoint.outputs if each.name not in self._without))

    @property
    def failed(self) -> bool:
        """True if an internal error of this process prevented an answer."""
        return self._answering is not None and self._answering.fatal.is_set()

    @property
    def alive(self) -> bool:
        """True if requests are answered: all processes, threads and sockets exist."""
        return self.door is not None and self.door.alive and self._answering is not None and self._answering.alive

    def why_dead(self) -> str:
        """Say what may have died, once it is not alive."""
        assert self._runtime_files is not None
        return f"the front door or the thread that answers it died, or a socket was removed from {self._runtime_files.folder}"

    def close(self, timeout_s: float) -> None:
        """Close the front door, by force after ``timeout_s`` seconds, and the backend, even one that is still starting."""
        if self.door is not None:
            self.door.close(timeout_s)
        if self._answering is not None:
            self._answering.close()
        if self._runtime_files is not None:
            self._runtime_files.remove()
