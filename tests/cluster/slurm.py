"""A real Slurm on this machine: munged, slurmctld and a slurmd per emulated node, with a folder and ports of their own."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.paths import ROOT

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue", "sinfo")
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.1
CPUS_PER_NODE = 4
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL"}
"""States of a job that does not come back."""
CONFIG = """\
ClusterName=emulated
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0
ReturnToService=2
MinJobAge=3600
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_no_cluster() -> str | None:
    """What a cluster lacks on this machine; None where it can be started."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"Slurm is not installed ({missing[0]} is missing): run tests/cluster/install.sh as root"
    if os.geteuid() != 0:
        return f"Slurm's daemons run as root, this is user {os.geteuid()}: run the tests as root"
    return None


class Cluster:
    """Use as a context manager; leaving it ends every daemon, and every job with it."""

    def __init__(self, folder: Path, *, nodes: int = 3) -> None:
        self.folder = folder
        self.nodes = [f"n{index}" for index in range(nodes)]
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._log = folder / "daemons.log"

    def __enter__(self) -> "Cluster":
        if reason := why_no_cluster():
            raise RuntimeError(f"no cluster can be started, {reason}")
        self.folder.mkdir(parents=True)
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Jobs first: nobody else would end their processes."""
        with contextlib.suppress(RuntimeError, TimeoutError):  # a controller that never came up has no jobs
            self.run("scancel", "--user=root")
            wait_until(lambda: not self.queue(), "no job left", STOP_TIMEOUT_S)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    @property
    def environment(self) -> dict[str, str]:
        """For Slurm's commands: this cluster, whatever else is configured, and nothing of a job around us; a job finds out by
        itself how many threads its ranks may have."""
        others = ("SLURM", "SBATCH", "OMP_NUM_THREADS")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        return inherited | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str) -> str:
        """Standard output of one of Slurm's commands."""
        done = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=60)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr or done.stdout}")
        return done.stdout

    def queue(self) -> set[int]:
        """Numbers of the jobs that have not ended, without their components."""
        return {int(line.split("+")[0]) for line in self.run("squeue", "--noheader", "--format=%i").split()}

    def job(self, number: int, component: int | None = None) -> dict[str, str]:
        """What `scontrol show job` says."""
        name = str(number) if component is None else f"{number}+{component}"
        shown = self.run("scontrol", "--oneliner", "show", "job", name)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def start_soon(self, number: int) -> None:
        """In 10 s instead of two minutes, what Slurm gives a requeued job's last processes and messages.

        At once would be too soon: nodes still refuse the job's credentials, and it counts as failed. A start time in the
        future would be too late: a heterogeneous job is looked at again when something changes.
        """
        time.sleep(10)
        self.run("scontrol", "update", f"JobId={number}", "StartTime=now", "TimeLimit=60")

    def _start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self.folder.chmod(0o755)  # munged refuses a socket that others could not reach
        for name in ("state", *(f"spool.{node}" for node in self.nodes)):
            (self.folder / name).mkdir()
        controller_port, *ports = _free_ports(1 + len(self.nodes))
        host = socket.gethostname()
        lines = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
            f"CPUs={CPUS_PER_NODE} RealMemory=8000 Gres=gpu:2"
            for node, port in zip(self.nodes, ports, strict=True)
        ]
        # Any character device will do as a GPU that nobody opens.
        (self.folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        (self.folder / "slurm.conf").write_text(
            CONFIG.format(
                host=host,
                folder=self.folder,
                controller_port=controller_port,
                nodes="\n".join(lines),
            )
        )
        files = {name: f"--{name}-file={self.folder / 'munge'}.{name}" for name in ("pid", "log", "seed")}
        self._daemon(
            "munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", f"--key-file={key}",
            *files.values(), "--num-threads=2",
        )  # fmt: skip
        wait_until((self.folder / "munge.socket").exists, "munged has its socket", START_TIMEOUT_S)
        self._daemon("slurmctld", "-D", "-i")
        for node in self.nodes:
            self._daemon("slurmd", "-D", "-N", node)
        wait_until(self._is_up, "every node idle", START_TIMEOUT_S)

    def _daemon(self, *command: str) -> None:
        with self._log.open("ab") as log:
            self._daemons.append(
                subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)
            )

    def _is_up(self) -> bool:
        dead = [daemon for daemon in self._daemons if daemon.poll() is not None]
        if dead:
            raise RuntimeError(f"{dead[0].args} ended with {dead[0].returncode}:\n{self._log.read_text()[-4000:]}")
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%D %t"], env=self.environment, capture_output=True, text=True, timeout=60
        )
        return done.stdout.split() == [str(len(self.nodes)), "idle"]


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float) -> float:
    """Seconds until ``condition`` held.

    Raises:
        TimeoutError: it did not.
    """
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > timeout_s:
            raise TimeoutError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(POLL_S)
    return time.monotonic() - started


def _free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports
