"""Runs on the nodes of a Slurm job, started there by slurm_job.py: once per task, in the interpreter of the task's program."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from nemo_style_rlhf.errors import USER_ERROR_EXIT
from nemo_style_rlhf.launch.local import Child, ProgramFailed
from nemo_style_rlhf.launch.ports import free_ports
from nemo_style_rlhf.launch.program import ENGINE_CONFIG, engine_program, threads_of_a_rank
from nemo_style_rlhf.launch.supervisor import Supervisor

RETRIES = 2
"""Further starts of an engine that ended with a user's mistake: it may only have found no memory."""
POLL_S = 0.5


def address(peer: str) -> str:
    """This node's address that leads to it from ``peer``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect((peer, 9))
        return str(route.getsockname()[0])


def interpreter() -> list[str]:
    """This Python with its options, which stand before ``-m``, the module and its arguments."""
    return [sys.executable, *sys.orig_argv[1 : -len(sys.argv) - 1]]


def run_task(told: str, ranks: str, master: str, port: str, *words: str) -> int:
    """Run a program as one rank of its component; returns its exit code.

    Slurm signals every process of a task, and srun makes SIGTERM a SIGKILL. So the job sends SIGUSR2, which only this process
    heeds, as its children start with SIGUSR1 and SIGUSR2 ignored: it sends the program alone the signal ``told``, not Triton or
    a worker. What the program leaves behind Slurm ends.

    Args:
        told: name of a signal without SIG.
        ranks: number of them per node.
        master, port: where they meet.
    """
    environment = threads_of_a_rank(int(ranks)) | os.environ
    if int(environment["SLURM_NTASKS"]) > 1:
        environment |= {"RANK": environment["SLURM_PROCID"], "WORLD_SIZE": environment["SLURM_NTASKS"]}
        environment |= {"LOCAL_RANK": environment["SLURM_LOCALID"], "LOCAL_WORLD_SIZE": ranks}
        environment |= {"MASTER_ADDR": master, "MASTER_PORT": port}
    program = subprocess.Popen([*interpreter(), *words], env=environment, stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGUSR2, lambda *_: program.send_signal(signal.Signals[f"SIG{told}"]))
    signal.signal(signal.SIGTERM, lambda *_: None)  # the program has it, too
    code = program.wait()
    for late in (signal.SIGUSR2, signal.SIGTERM):  # an ending interpreter restores the default handlers
        signal.signal(late, signal.SIG_IGN)
    return code if code >= 0 else 128 - code


def run_engine(folder: str, peer: str, per_node: str, gpus: str, *words: str) -> int:
    """Run an engine, and start it again until it ends with 0, but not for ever if its settings are wrong; returns its exit code.

    Args:
        folder: where the actor describes its engines.
        peer: the actor's address.
        per_node, gpus: number of engines per node, and of GPUs per engine.
    """
    local, name = int(os.environ["SLURM_LOCALID"]), f"engine-{os.environ['SLURM_PROCID']}"
    devices, first = visible_gpus(), local * int(gpus)
    mine = devices[first : first + int(gpus)]
    if devices and len(mine) < int(gpus):
        print(
            f"error: ENGINES_PER_NODE={per_node} with GPUS_PER_ENGINE={gpus}, but {socket.gethostname()} shows "
            f"{len(devices)} GPUs"
        )
        return USER_ERROR_EXIT
    environment = threads_of_a_rank(int(per_node)) | os.environ
    environment |= {"CUDA_VISIBLE_DEVICES": ",".join(mine)} if mine else {}
    program = engine_program(name, Path(folder), environment)
    program = replace(program, argv=[*interpreter(), *program.argv[1:], f"server.host={address(peer)}", *words])
    while not Path(folder, f"{ENGINE_CONFIG}.yaml").exists():
        time.sleep(POLL_S)
    supervisor = Supervisor(
        Path(folder), RETRIES, key="", since=f"with exit code {USER_ERROR_EXIT}",
        launch=partial(Child, shown=True), say=partial(print, flush=True),
    )  # fmt: skip
    supervisor.resume(program, Path(os.devnull))
    try:
        while (code := supervisor[name].poll()) != 0:
            time.sleep(POLL_S)
            if code is not None:
                supervisor.lost(name, counts=code == USER_ERROR_EXIT, mistakes=True)
    except ProgramFailed as error:
        print(error, flush=True)
        return USER_ERROR_EXIT
    return 0


def visible_gpus() -> list[str]:
    """The GPUs that Slurm gave to this node's tasks, else all that the driver shows."""
    if given := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return given.split(",")
    if shutil.which("nvidia-smi") is None:
        return []
    asked = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    shown = subprocess.run(asked, stdout=subprocess.PIPE, text=True)
    return [] if shown.returncode else shown.stdout.splitlines()


def main(kind: str, *words: str) -> int:
    if kind == "address":
        print(address(*words), *free_ports(2))
        return 0
    return run_task(*words) if kind == "task" else run_engine(*words)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
