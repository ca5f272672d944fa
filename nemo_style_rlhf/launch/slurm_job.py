"""Runs a Slurm job from its first node, where the scripts of slurm/ start it.

The Python that runs it may be any of that host, with no package: this file and those that it imports need only the standard
library, and this file the syntax of Python 3.6. Programs run in their own interpreters, on the nodes under slurm_node.py.
"""

import sys

if sys.version_info < (3, 9):  # noqa: UP036 a batch host may have an older one
    found = sys.version.split()[0]
    print(f"error: BATCH_PYTHON is Python {found}: give one of 3.9 or later, no package is needed", file=sys.stderr)
    sys.exit(2)

import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from nemo_style_rlhf.errors import USER_ERROR_EXIT, UserError
from nemo_style_rlhf.launch.preemption import PREEMPTED_EXIT
from nemo_style_rlhf.launch.run_certificates import Authority

POLL_S, PAUSE_S = 1.0, 0.2
LAST_WAIT_S = 3.0
"""Seconds for steps that were told to end to do so."""
TAIL_LINES = 20
TERMINATED_EXIT = 128 + signal.SIGTERM
PREPARED = 'trap "" USR1 USR2; eval "$1"; exec "${@:2}"'
"""Shell that runs a command on a node after the user's setup. Neither dies of signals that are meant for a program."""
TORCHRUN = 'eval "$1"; exec $2 -m torch.distributed.run --node-rank="$SLURM_NODEID" "${@:3}"'
WHERE = re.compile(r"([\d.]+) (\d+) (\d+)")
"""The line of slurm_node.py that names a node's address and two free ports; the user's setup may print others."""
EXAMPLES = {"CRITIC_ARGS": "model.path=REWARD_MODEL", "ACTOR_ARGS": "model.path=POLICY data.train_path=PROMPTS"}

Process = subprocess.Popen


class JobEnded(Exception):
    """Slurm ends the job."""


def write(text: str) -> None:
    """Add to the job's log. A full disk, or a locale without one of the letters, must not keep the job from its end."""
    with suppress(OSError):
        os.write(1, f"{text}\n".encode(errors="surrogateescape"))


def say(text: str) -> None:
    write(f"{datetime.now():%F %T} {text}")


class Component:
    """One component of a heterogeneous job: its nodes, and the way to run commands there."""

    def __init__(self, group: int, name: str, program: str, ranks: int, *, ends_together: bool = True) -> None:
        """
        Args:
            program: prefix of the settings that describe its program, CRITIC or ACTOR.
            ranks: processes per node.
            ends_together: whether the end of one process with an error ends all.
        """
        self.name, self.ranks = name, ranks
        self.nodelist = os.environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{group}", "")
        self.nodes = int(os.environ.get(f"SLURM_JOB_NUM_NODES_HET_GROUP_{group}", "0"))
        python, setup = os.environ[f"{program}_PYTHON"], os.environ[f"{program}_SETUP"]
        self._refused = f"{program}_PYTHON={python} did not run on the node"
        # A task is a whole process with its threads: it may use every core and GPU of its node.
        self._srun = [
            "srun", "--export=ALL", "--overcommit", "--cpu-bind=none", "--open-mode=append", f"--job-name={name}",
            f"--kill-on-bad-exit={int(ends_together)}", f"--het-group={group}", *os.environ[f"{program}_SRUN"].split(),
        ]  # fmt: skip
        self._command = [
            "bash",
            "-c",
            PREPARED,
            "task",
            setup,
            *python.split(),
            "-m",
            "nemo_style_rlhf.launch.slurm_node",
        ]

    def where(self, peer: str, *, nodes: int = 1) -> "list[tuple[str, str, str]]":
        """The addresses of the first ``nodes`` that lead to them from ``peer``, each with two free ports.

        Raises:
            UserError: a node did not run the program's interpreter.
        """
        srun = [*self._srun, f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
        done = subprocess.run([*srun, *self._command, "address", peer], stdout=subprocess.PIPE, errors="replace")
        found = [match.groups() for match in map(WHERE.fullmatch, done.stdout.splitlines()) if match]
        if len(found) != nodes:
            raise UserError(f"{self._refused}{'s' * (nodes > 1)} of the {self.name}: see above")
        return found  # type: ignore[return-value]

    def start(self, log: Path, *words: str) -> "Process[bytes]":
        """Run slurm_node.py with ``words`` in every process of the component."""
        tasks = [f"--nodes={self.nodes}", f"--ntasks={self.nodes * self.ranks}", f"--ntasks-per-node={self.ranks}"]
        return Process([*self._srun, *tasks, f"--output={log}", *self._command, *words])


class PPOJob:
    """Critic server, actor and, in a third component, engines. It ends with the first of them, and the others with it."""

    def __init__(self) -> None:
        """
        Raises:
            UserError: a setting is missing or cannot be used.
        """
        setting = os.environ
        if not setting.get("SLURM_JOB_ID_HET_GROUP_1"):
            raise UserError("this is no heterogeneous Slurm job: start it with sbatch slurm/ppo_hetjob.sh")
        self._critic_words, self._actor_words = map(words_of, EXAMPLES)
        folder = setting["OUTPUT_DIR"]
        if {*folder} & {*"'\\$%"}:  # Hydra and srun would read them
            raise UserError(f"OUTPUT_DIR={folder} holds one of ' \\ $ %: give a folder without")
        self._folder = Path(folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"OUTPUT_DIR={folder} cannot be made: give a folder that every node can write to"
            ) from error
        self._grace_s, self._margin_s = number("STOP_GRACE_S", float), number("REQUEUE_MARGIN_S", float)
        self._critic = Component(0, "critic", "CRITIC", number("CRITIC_RANKS"))
        self._actor = Component(1, "actor", "ACTOR", number("ACTOR_RANKS"))
        self._engines = Component(2, "engines", "ACTOR", number("ENGINES_PER_NODE"), ends_together=False)
        self._gpus_per_engine = number("GPUS_PER_ENGINE")
        self._number = setting["SLURM_JOB_ID"]
        self._parts: dict[str, Process[bytes]] = {}
        """The running step of each component, by its name."""
        self._warned = False
        """Whether Slurm has told of the time limit."""
        self._deadline: float | None = None
        """Time from which no checkpoint is waited for, once the actor is told to commit one."""

    def run(self) -> int:
        """Run the job to its end; returns its exit code."""
        os.environ["NSR_CRITIC_TOKEN"] = secrets.token_hex(32)  # of this job alone, and never on a command line
        private = self._folder / f"tls-{self._number}"
        try:
            signal.signal(signal.SIGUSR1, self._warn)
            signal.signal(signal.SIGTERM, self._end)
            self._start(Authority(private))
            first, code = self._first_end()
            if first:
                say(f"the {first} ended with exit code {code}")
            self._end_components()
        except JobEnded:
            say("SIGTERM")
            self._end_components()
            return TERMINATED_EXIT
        finally:
            shutil.rmtree(private, ignore_errors=True)
        if code == PREEMPTED_EXIT:
            return requeue(f"submit it again with OUTPUT_DIR={self._folder}, the run goes on")
        if code:
            with suppress(OSError):
                lines = (self._folder / f"{first}.log").read_text(errors="replace").splitlines()
                write("\n".join(lines[-TAIL_LINES:]))
        elif exit_code(self._parts["critic"]):
            say(f"the critic ended with exit code {exit_code(self._parts['critic'])} after the run was complete")
        return code

    def _start(self, authority: Authority) -> None:
        critic, actor, engines, folder = self._critic, self._actor, self._engines, self._folder
        actor_node = first_address(actor.nodelist)
        ((host, port, critic_port),) = critic.where(actor_node)
        ((actor_host, _, actor_port),) = actor.where(first_address(critic.nodelist))
        launched = folder / "actor" / "engines"
        connect = [f"remote_critic_rm.host={host}", f"remote_critic_rm.port={port}"]
        addresses = [host]
        if engines.nodes:
            addresses += [found[0] for found in engines.where(actor_node, nodes=engines.nodes)]
        certificate, key = authority.certificate("server", *addresses)
        tls = [f"server.tls.certificate='{certificate}'", f"server.tls.key='{key}'"]
        serve = [f"server.host={host}", f"server.port={port}", *tls]
        connect.append(f"remote_critic_rm.tls.ca='{authority.ca}'")
        if engines.nodes:
            shutil.rmtree(launched, ignore_errors=True)  # of an earlier start
            connect += [f"generation.engines.count={engines.nodes * engines.ranks}", "generation.engines.launch=false"]
            connect.append(f"generation.engines.tls.ca='{authority.ca}'")
            say(f"engines on {engines.nodelist}, {engines.ranks} per node")
        say(
            f"critic on {critic.nodelist} at {host}:{port}, actor on {actor.nodelist}, in {folder}; processes per node: "
            f"critic {critic.ranks}, actor {actor.ranks}"
        )
        self._parts["critic"] = critic.start(
            folder / "critic.log", "task", "TERM", str(critic.ranks), host, critic_port,
            "servers/serve_ppo_critic.py", f"run.output_dir='{folder}/critic'", *self._critic_words, *serve,
        )  # fmt: skip
        self._parts["actor"] = actor.start(
            folder / "actor.log", "task", "USR1", str(actor.ranks), actor_host, actor_port,
            "trainers/train_ppo_actor.py", f"run.output_dir='{folder}/actor'", *self._actor_words, *connect,
        )  # fmt: skip
        if engines.nodes:
            self._parts["engines"] = engines.start(
                folder / "engines.log", "engine", str(launched), actor_node, str(engines.ranks),
                str(self._gpus_per_engine), *tls,
            )  # fmt: skip

    def _first_end(self) -> "tuple[str | None, int]":
        """Wait for the first component that ends; returns its name and the job's exit code. No name if time is over."""
        while True:
            time.sleep(POLL_S)
            ended = [name for name, part in self._parts.items() if part.poll() is not None]
            if ended:
                break
            if self._warned and time.time() >= self._tell_actor():
                say("no checkpoint within the time: the job resumes from the last one")
                return None, PREEMPTED_EXIT
        if "actor" not in ended:
            return ended[0], exit_code(self._parts[ended[0]]) or 1
        code = exit_code(self._parts["actor"])
        # When the first of several ranks ends, srun kills the others, and then reports a signal.
        return "actor", PREEMPTED_EXIT if self._warned and code >= 128 else code

    def _tell_actor(self) -> float:
        """Make the actor commit a checkpoint and end; returns the time from which that is no longer waited for. Called again and
        again, as one signal may come too early to be heeded."""
        if self._deadline is None:
            asked = ["squeue", "--noheader", f"--jobs={self._number}", "--format=%e"]
            iso = {**os.environ, "SLURM_TIME_FORMAT": "standard"}
            end = subprocess.run(asked, stdout=subprocess.PIPE, text=True, env=iso).stdout.partition("\n")[0].strip()
            say(f"SIGUSR1, the time limit is {end}: the actor is told to commit a checkpoint")
            self._deadline = float("inf")
            with suppress(ValueError):  # there is no limit
                self._deadline = datetime.fromisoformat(end).timestamp() - self._margin_s
        self._parts["actor"].send_signal(signal.SIGUSR2)
        return self._deadline

    def _end_components(self) -> None:
        for name in self._parts.keys() - {"critic"}:
            self._parts[name].terminate()  # SIGKILL for its tasks; first, or it would take the server's end for a fault
        critic = self._parts.get("critic")
        if critic is not None:
            critic.send_signal(signal.SIGUSR2)  # SIGTERM for the server: slurm_node.py
            wait_until_ended([critic], self._grace_s)
            critic.terminate()
        wait_until_ended([*self._parts.values()], LAST_WAIT_S)

    def _warn(self, *_: object) -> None:
        self._warned = True

    def _end(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise JobEnded


def run_supervised(words: "list[str]") -> int:
    """Run a supervised stage under torchrun on every node; returns its exit code.

    Raises:
        UserError: ``words`` do not begin with a trainer, or a setting cannot be used.
    """
    if not words or not re.fullmatch(r"trainers/.*\.py", words[0]):
        raise UserError(
            f"the first argument is '{words[0] if words else ''}': give a trainer, such as trainers/train_sft.py"
        )
    setting = os.environ
    nodes, master = setting["SLURM_JOB_NUM_NODES"], first_address(setting["SLURM_JOB_NODELIST"])
    port = 20000 + int(setting["SLURM_JOB_ID"]) % 10000  # of this job, below the ports that the kernel hands out
    warned: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: warned.append(number))
    # torchrun, not one task per rank: Lightning prefers its variables to Slurm's, which describe the job and not this run.
    step = Process([
        "srun", "--export=ALL", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--overcommit",
        "--cpu-bind=none", "--kill-on-bad-exit=1", *setting["STAGE_SRUN"].split(),
        "bash", "-c", TORCHRUN, "task", setting["STAGE_SETUP"], setting["STAGE_PYTHON"],
        f"--nnodes={nodes}", f"--nproc-per-node={number('STAGE_RANKS')}", f"--master-addr={master}",
        f"--master-port={port}", *words,
    ])  # fmt: skip
    while step.poll() is None:
        time.sleep(PAUSE_S)
        if warned:
            say("SIGUSR1: the job is requeued and resumes from its last checkpoint")
            step.terminate()  # srun makes it SIGKILL for the ranks; checkpoints are written atomically
            step.wait()
            return requeue("submit it again, the run goes on")
    return exit_code(step)


def words_of(setting: str) -> "list[str]":
    """The overrides in a setting, split as a shell does, but nothing is expanded: brackets and braces belong to them.

    Raises:
        UserError: there are none, or a quote stays open.
    """
    text = os.environ[setting]
    if not text.strip():
        raise UserError(f'{setting} is empty: export {setting}="{EXAMPLES[setting]}" before sbatch')
    with suppress(ValueError):
        words = shlex.split(text.replace("\\\n", ""))  # continued lines
        if not any("\n" in word for word in words):
            return words
    raise UserError(
        f"{setting} cannot be split into words: close each quote on the line that opens it, and put a \\ before one that is text"
    )


def number(setting: str, kind: type = int) -> Any:
    """The number in a setting.

    Raises:
        UserError: it holds none.
    """
    try:
        return kind(os.environ[setting])
    except ValueError as error:
        raise UserError(f"{setting}={os.environ[setting]} is not a number: give digits alone") from error


def first_address(nodelist: str) -> str:
    """Where Slurm itself reaches the first node; no resolver knows the names of cloud nodes and emulated ones."""
    first = _scontrol("show", "hostnames", nodelist).split()[0]
    match = re.search(r"NodeAddr=(\S+)", _scontrol("show", "node", first))
    if match is None:
        raise UserError(f"scontrol show node {first} names no NodeAddr: give nodes that Slurm can reach")
    return match[1]


def _scontrol(*words: str) -> str:
    done = subprocess.run(["scontrol", *words], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"scontrol {' '.join(words)} failed: {' '.join(done.stderr.split())}")
    return done.stdout


def wait_until_ended(steps: "list[Process[bytes]]", timeout_s: float) -> None:
    """Wait until all have ended, or the time is over."""
    deadline = time.monotonic() + timeout_s
    while any(step.poll() is None for step in steps) and time.monotonic() < deadline:
        time.sleep(PAUSE_S)


def exit_code(step: "Process[Any]") -> int:
    """The exit code of a step, as a shell gives it."""
    code = step.wait()
    return code if code >= 0 else 128 - code


def requeue(remedy: str) -> int:
    """Make Slurm start the job again; ends with it. Returns the exit code of a job for which Slurm does not."""
    say("requeueing")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]]).returncode == 0:
        while True:
            time.sleep(60)  # Slurm ends this process: one that ends itself may count as failed
    say(f"the job could not be requeued: {remedy}")
    return PREEMPTED_EXIT


def main(kind: str, *words: str) -> int:
    """Run the job of slurm/ppo_hetjob.sh (``ppo``) or slurm/supervised.sh (``supervised``); returns its exit code."""
    try:
        return PPOJob().run() if kind == "ppo" else run_supervised([*words])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR_EXIT


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
