"""A real Ray on this machine: a head and a raylet per further node, with a token, ports and addresses of their own."""

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import tempfile
from pathlib import Path

import psutil

from nemo_style_rlhf.launch.ports import free_ports
from nemo_style_rlhf.launch.program import ACTOR_PYTHON
from tests.cluster.slurm import wait_until
from tests.support.paths import ROOT

RAY = str(ACTOR_PYTHON.with_name("ray"))
START_TIMEOUT_S = 90.0
CPUS_PER_NODE = 4
GPUS_PER_NODE = 4
"""Ray only counts them, and tells each process which of them are its own."""
OBJECT_STORE_BYTES = 80_000_000


class RayNode:
    """What one `ray start --block` has started."""

    def __init__(self, cluster: "RayNodes", *options: str) -> None:
        self._log = cluster.folder / f"node{len(cluster.nodes)}.log"
        common = (f"--object-store-memory={OBJECT_STORE_BYTES}", "--dashboard-agent-listen-port=0")
        with self._log.open("wb") as output:
            self._start = subprocess.Popen(
                [RAY, "start", "--block", f"--temp-dir={cluster.folder}/ray", "--disable-usage-stats", *common, *options],
                cwd=cluster.folder, env=cluster.environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            wait_until(self._started, "the Ray node has started", START_TIMEOUT_S)
        except BaseException:
            self.kill()
            raise

    def _started(self) -> bool:
        assert self._start.poll() is None, self.output()
        return "This command will now block forever" in self.output()

    def output(self) -> str:
        return re.sub(r"\x1b\[\d+m", "", self._log.read_text())

    def processes(self) -> list[psutil.Process]:
        """Those of Ray and of the runs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self._start.pid).children(recursive=True)
        return []

    def daemon(self, name: str) -> psutil.Process:
        """The process of one of Ray's own programs."""
        (found,) = (process for process in self.processes() if process.name() == name)
        return found

    def kill(self) -> None:
        """Kill everything of the node, as the loss of its machine does."""
        started = [*self.processes(), psutil.Process(self._start.pid)] if self._start.poll() is None else []
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._start.wait()


class RayNodes:
    """Use as a context manager: a cluster whose head has this machine's own address, and without CPUs no process of a run. Its
    other nodes have addresses of the loopback net."""

    def __init__(self, *, workers: int = 2, head_cpus: int = 0, mode: str = "token") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="nsr_ray_"))  # sockets have short paths
        self.nodes: list[RayNode] = []
        self._wanted, self._head_cpus = workers, head_cpus
        token = self.folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        others = ("RAY_", "OMP_NUM_THREADS")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        self.environment = inherited | {
            "RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN_PATH": str(token), "PYTHONPATH": str(ROOT), "RAY_COLOR_PREFIX": "0",
        }  # fmt: skip

    def __enter__(self) -> "RayNodes":
        try:
            # The default is one port for all clusters, and the kernel spreads the callers over them
            (clients,) = free_ports(1)
            free = ("--port=0", "--dashboard-port=0", f"--ray-client-server-port={clients}")
            self.nodes.append(RayNode(self, "--head", f"--num-cpus={self._head_cpus}", "--num-gpus=0", *free))
            for _ in range(self._wanted):
                self.add_node()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in reversed(self.nodes):
            node.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def address(self) -> str:
        """Of the head."""
        return (self.folder / "ray" / "ray_current_cluster").read_text().strip()

    @property
    def dashboard(self) -> str:
        """URL of the dashboard, and of jobs."""
        found = re.search(r"RAY_API_SERVER_ADDRESS='(http://[\d.:]+)'", self.nodes[0].output())
        assert found is not None
        return found[1]

    def add_node(self) -> RayNode:
        """Node i has the address 127.0.0.(i + 1)."""
        where = [
            f"--node-ip-address=127.0.0.{1 + len(self.nodes)}",
            f"--num-cpus={CPUS_PER_NODE}",
            f"--num-gpus={GPUS_PER_NODE}",
        ]
        self.nodes.append(RayNode(self, f"--address={self.address}", *where))
        return self.nodes[-1]

    def node_at(self, address: str) -> RayNode:
        return self.nodes[int(address.rpartition(".")[2]) - 1]

    def run(self, *command: str, cwd: Path = ROOT, timeout_s: float = 60.0) -> str:
        """Standard output of one of Ray's commands."""
        done = subprocess.run(
            [RAY, *command], cwd=cwd, env=self.environment, capture_output=True, text=True, timeout=timeout_s
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
