"""PyTriton 0.7 behind a Unix socket. No other file uses PyTriton's private members.

Three properties of PyTriton are replaced here. Its server listens on TCP and puts the secret of its admin interface into
tritonserver's arguments: here it listens on a Unix socket in a folder of this user, has its models before it starts, refuses to
load others, and needs no secret. All users can read its segments in /dev/shm, some segments have meaningless names, and hanging
processes outlive it: here ``confine.py`` starts tritonserver, a supervisor ends it, and ``runtime_files.py`` names every segment.
Its models answer every exception with HTTP 500 and the traceback, paths included: here a few lines are appended to the code that
it sends into Triton's Python backend. requirements/server.txt pins PyTriton to 0.7.0; tests/integration/test_critic_errors.py and
test_front_door.py check this file against it.
"""

import contextlib
import os
import socket
import subprocess
import sys
import sysconfig
from http.client import HTTPConnection
from pathlib import Path

import psutil
import pytriton.triton  # type: ignore[import-untyped]
from pytriton.models.model import Model  # type: ignore[import-untyped]
from pytriton.server.triton_server import TritonServer  # type: ignore[import-untyped]
from pytriton.triton import Triton, TritonConfig, TritonLifecyclePolicy, TritonSecurityConfig
from pytriton.utils.distribution import get_libs_path, get_root_module_path, get_stub_path  # type: ignore[import-untyped]

from nemo_style_rlhf.critic_service import runtime_files
from nemo_style_rlhf.critic_service.runtime_files import RuntimeFiles, remove_those_of_dead_servers, require_room
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.processes import confine
from nemo_style_rlhf.processes.child import ChildProcess
from nemo_style_rlhf.wire import messages
from nemo_style_rlhf.wire.listening import within
from nemo_style_rlhf.wire.messages import ERROR, Code, bytes_tensor

START_TIMEOUT_S = 60.0
LOG_TAIL_LINES = 20
ERROR_KINDS = {400: "INVALID_ARG", 404: "NOT_FOUND", 503: "UNAVAILABLE", 500: "INTERNAL"}
"""Triton's kind of error for each HTTP status."""
PACKAGES = "libpython{0} on Debian and Ubuntu, python{0}-libs on Fedora and RHEL"
SMALL = {"OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
"""For tritonserver and the processes of its Python backend, two per endpoint: they copy arrays and multiply none. But NumPy's
import starts threads for every core: a quarter of the processor time of a server's start. And tritonserver takes a context and a
pool on every GPU that it sees: 0.57 GiB of an H200, asleep or not."""

_APPENDIX = f'''

import functools

# In the process that this one starts for it: names of segments tell whose they are.
data.BlocksStoreManager.start = functools.partialmethod(
    data.BlocksStoreManager.start,
    exec,
    (
        "from multiprocessing import shared_memory\\n"
        "shared_memory._SHM_NAME_PREFIX, shared_memory._SHM_SAFE_NAME_LENGTH = '/SERVERS_NAME-', 64",
    ),
)
_wrap_plain_response = _wrap_response


def _wrap_response(response, requested_outputs_names, model_outputs_dict):
    if response.data is not None and "{ERROR.name}" in response.data:
        kind, _, sentence = response.data["{ERROR.name}"].item(0).decode("utf-8").partition(" ")
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(sentence, getattr(pb_utils.TritonError, kind)))
    return _wrap_plain_response(response, requested_outputs_names, model_outputs_dict)


class TritonPythonModel(TritonPythonModel):
    def execute(self, triton_requests):
        try:
            return super().execute(triton_requests)
        except pb_utils.TritonModelException as error:
            LOGGER.error(str(error))
            sentence = "[{Code.INTERNAL.wire}] the server could not process the request; its log says more"
            error = pb_utils.TritonError(sentence, pb_utils.TritonError.INTERNAL)
            return [pb_utils.InferenceResponse(error=error) for _ in triton_requests]
'''


def error_tensor(code: Code, text: str):  # type: ignore[no-untyped-def]
    """Make the ``error`` output that the appended lines read."""
    return bytes_tensor(f"{ERROR_KINDS[code.status]} {text}".encode())


class _Model(Model):  # type: ignore[misc]
    servers_name: str
    """Name of the last backend created."""

    def generate_model(self, model_repository: Path) -> None:
        super().generate_model(model_repository)
        with (model_repository / self.model_name / str(self.model_version) / "model.py").open("a") as code:
            code.write(_APPENDIX.replace("SERVERS_NAME", self.servers_name))


class _Server(TritonServer):  # type: ignore[misc]
    """Starts tritonserver with a supervisor. PyTriton's own launch splits arguments at spaces."""

    name: str
    log: Path | None = None

    def start(self) -> None:
        arguments: list[str] = []
        for name, given in self._server_config.server_args().items():
            for value in given if isinstance(given, list | tuple) else [given]:
                arguments += [] if value is None else [f"--{name}", str(value)]
        # Loading several models at a time crashed on a busy machine, with Boost's lock_exception.
        arguments += ["--model-load-thread-count", "1"]
        command = [sys.executable, confine.__file__, str(self._server_path), *arguments]
        with contextlib.ExitStack() as opened:
            log = None if self.log is None else opened.enter_context(self.log.open("ab"))
            self.process = ChildProcess(
                command,
                env={**self._get_env(), **SMALL},
                stdout=log,
                stderr=subprocess.STDOUT if log else None,
                afterwards=[sys.executable, "-m", runtime_files.__name__, self.name],
            )

    def is_alive(self) -> bool:
        return self.process.poll() is None


class Backend(Triton):  # type: ignore[misc]
    """A Triton that only processes of this user can reach: bind endpoints, :meth:`launch`, send requests to :attr:`socket`."""

    def __init__(self, *, metrics: bool, verbose: bool) -> None:
        remove_those_of_dead_servers()
        require_room()
        self._runtime_files = RuntimeFiles()
        folder = self._runtime_files.folder
        self.folder = folder
        self.socket = folder / "http.sock"
        self.metrics_socket = folder / "metrics.sock" if metrics else None
        self._log = None if verbose else folder / "triton.log"
        pytriton.triton.Model, pytriton.triton.TritonServer = _Model, _Server
        _Model.servers_name = self._runtime_files.name
        let_stub_find_libpython()
        config = TritonConfig(
            http_address=f"unix:{self.socket}",
            http_port=1,  # required, but without meaning for a Unix socket
            http_header_forward_pattern=messages.HEADER_PATTERN,
            allow_grpc=False,
            allow_metrics=metrics,
            metrics_address=f"unix:{self.metrics_socket}" if metrics else None,
            metrics_port=1 if metrics else None,
            allow_gpu_metrics=False if metrics else None,
        )
        super().__init__(
            config=config,
            workspace=folder / "pytriton",
            triton_lifecycle_policy=TritonLifecyclePolicy(launch_triton_on_startup=True, local_model_store=True),
            security_config=TritonSecurityConfig(restricted_endpoints=[]),
        )
        # No client can load a model, so no right to do so is needed; and no model starts twice to report its configuration.
        self._triton_server_config["model_control_mode"] = "none"
        self._triton_server_config["load-model"] = None
        self._triton_server_config["strict_model_config"] = True
        self._processes: list[psutil.Process] = []

    def launch(self) -> None:
        """Start tritonserver. It loads the bound endpoints."""
        self._initialize_server()
        self._triton_server.name, self._triton_server.log = self._runtime_files.name, self._log
        self._triton_server.start()

    def wait_until_ready(self) -> None:
        """Return once the bound endpoints are served.

        Raises:
            TimeoutError: Triton does not answer within ``START_TIMEOUT_S``, or died; :meth:`log_tail` has details.
        """
        if not within(START_TIMEOUT_S, lambda: self._is_ready() or not self._triton_server.is_alive()):
            raise TimeoutError(f"tritonserver did not answer within {START_TIMEOUT_S:.0f} s")
        if not self._triton_server.is_alive():
            raise TimeoutError(f"tritonserver ended with code {self._triton_server.process.returncode}")
        self._model_manager.setup_models()
        self._processes = psutil.Process(self._triton_server.process.pid).children(recursive=True)

    def is_alive(self) -> bool:
        """False once tritonserver, one of its endpoint processes or a thread that answers requests has died, or a socket was
        removed."""
        sockets = [self.socket, *([self.metrics_socket] if self.metrics_socket else [])]
        return super().is_alive() and all(map(_runs, self._processes)) and all(map(Path.is_socket, sockets))

    def log_tail(self) -> str:
        """The end of Triton's own log."""
        if self._log is None or not self._log.exists():
            return "(its log is above)"
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])

    def close(self) -> None:
        """Kill Triton, and remove its files on disk and in shared memory.

        PyTriton's threads have no more requests to serve. They are daemons and end with this process.
        """
        # Not Triton.stop: it waits for clients to hang up and takes half a second per endpoint, one after the other.
        if self._triton_server is not None:
            self._triton_server.process.kill()
        self._runtime_files.remove()

    def _shm_prefix(self) -> str:
        return f"{self._runtime_files.name}-"

    def _is_ready(self) -> bool:
        connection = HTTPConnection("localhost", timeout=5)
        connection.sock = socket.socket(socket.AF_UNIX)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.sock.connect(str(self.socket))
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == 200
        return False


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def require_libraries(python: str = f"{sys.version_info.major}.{sys.version_info.minor}") -> None:
    """Refuse a host on which tritonserver could not start.

    Raises:
        UserError: tritonserver, or its Python backend for this version, links a library that this host lacks.
    """
    let_stub_find_libpython()
    known = os.environ.get("LD_LIBRARY_PATH")
    paths = ":".join([*([known] if known else []), str(get_libs_path())])
    for program in (get_root_module_path() / "tritonserver" / "bin" / "tritonserver", get_stub_path(python)):
        with contextlib.suppress(OSError):  # a host without ldd
            linked = subprocess.run(
                ["ldd", program], capture_output=True, text=True, env={**os.environ, "LD_LIBRARY_PATH": paths}
            )
            missing = [line.split()[0] for line in linked.stdout.splitlines() if line.endswith("=> not found")]
            if missing:
                raise UserError(
                    f"{program.name} of PyTriton links {', '.join(missing)}, which this host lacks: install the package that "
                    f"brings it ({PACKAGES.format(python) if 'libpython' in missing[0] else 'see `ldd` of ' + str(program)})"
                )


def let_stub_find_libpython() -> None:
    """Set LD_LIBRARY_PATH for Triton's Python stub: with a pyenv or conda interpreter, only this leads to the right libpython."""
    libdir = sysconfig.get_config_var("LIBDIR")
    known = os.environ.get("LD_LIBRARY_PATH", "")
    if libdir and sysconfig.get_config_var("Py_ENABLE_SHARED") and known.split(":")[0] != libdir:
        os.environ["LD_LIBRARY_PATH"] = f"{libdir}:{known}" if known else libdir
