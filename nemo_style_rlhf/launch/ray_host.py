"""Starts one process of a run in a Ray actor, as every launcher starts it. Nothing else of ours goes through Ray."""

import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nemo_style_rlhf.launch.local import POLL_S, Child
from nemo_style_rlhf.launch.ports import free_ports
from nemo_style_rlhf.launch.ppo_run import remove_leftovers
from nemo_style_rlhf.launch.program import Program, threads_of_a_rank
from nemo_style_rlhf.launch.screen import GrowingLog

LEASE_S = 10.0
"""Seconds without contact with the driver after which the process is ended: the driver, its host or the network is gone."""
LOST_GRACE_S = 2.0
"""Seconds from SIGTERM to SIGKILL of a process without a driver."""
RANKS_BESIDE = "NSR_RANKS_BESIDE"
"""Environment variable with the number of ranks of the same program on the node. They share its cores."""


@dataclass(frozen=True)
class NodeInfo:
    """A host's findings about its node."""

    node: str
    """Ray's id of the node."""
    address: str
    """IP address at which the other nodes reach it."""
    gpus: tuple[str, ...]
    """The GPUs that Ray gave to the host."""
    fault: str | None
    """Reason why no process of the run can start there; None if it can."""


class HostedChild(Child):
    """A child that knows nothing of Ray."""

    def _environment(self) -> dict[str, str]:
        environment = {name: value for name, value in super()._environment().items() if not name.startswith("RAY_")}
        # Ray sets it to the CPUs that it has set aside; other launchers give a single rank all cores.
        environment.pop("OMP_NUM_THREADS", None)
        return environment | threads_of_a_rank(int(environment.pop(RANKS_BESIDE, "1")))


class Host:
    """Starts a program, reports its state, and ends it with the driver or with this process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._child: HostedChild | None = None
        self._news: GrowingLog | None = None
        self._heard, self._busy = time.monotonic(), False
        threading.Thread(target=self._watch, name="lease", daemon=True).start()

    def __repr__(self) -> str:
        """The name in Ray's dashboard."""
        return self._name

    def look(self, needed: Sequence[Path], mark: tuple[Path, str]) -> NodeInfo:
        """Check that the files and folders ``needed`` exist, and that the run's folder is shared.

        Args:
            mark: a file of the run and its content, to recognize the folder.
        """
        import ray

        context = ray.get_runtime_context()
        file, content = mark
        missing = [str(path) for path in needed if not path.exists()]
        fault = f"{missing[0]} does not exist there: every node needs it at this path" if missing else None
        if fault is None and not (file.is_file() and file.read_text() == content):
            fault = (
                f"{file.parents[1]} is another folder there: give run.output_dir on a file system that all nodes share"
            )
        gpus = tuple(context.get_accelerator_ids().get("GPU", ()))
        node = context.get_node_id()
        addresses = {each["NodeID"]: each["NodeManagerAddress"] for each in ray.nodes()}
        return NodeInfo(node, addresses[node], gpus, fault)

    def free_port(self) -> int:
        return free_ports(1)[0]

    def start(self, program: Program, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        self._news = GrowingLog(log)
        self._child = HostedChild(program, log, grace_s=LOST_GRACE_S)

    def renew(self) -> None:
        """Record that the driver is alive."""
        self._heard = time.monotonic()

    def poll(self) -> int | None:
        """The exit code, or None while the program runs."""
        return None if self._child is None else self._child.poll()

    def signal(self, number: int) -> None:
        if self._child is not None:
            self._child.signal(number)

    def clear(self, leftovers: Path | None = None) -> int:
        """Kill the program and what it has left; returns its exit code.

        Args:
            leftovers: the actor's folder, once the run is over.
        """
        if self._child is None:
            return -signal.SIGKILL
        self._busy = True
        try:
            code = self._child.kill()
            if leftovers is not None:
                remove_leftovers(leftovers)
        finally:
            self._heard, self._busy = time.monotonic(), False
        return code

    def _watch(self) -> None:
        while True:
            time.sleep(POLL_S)
            if self._news is not None:
                with suppress(OSError):  # the shared file system has a bad moment
                    for line in self._news.news():
                        print(line, flush=True)  # into the log that Ray's dashboard shows
            if time.monotonic() - self._heard > LEASE_S and not self._busy:
                if self._child is not None:
                    self._child.stop(LOST_GRACE_S)
                os._exit(1)
