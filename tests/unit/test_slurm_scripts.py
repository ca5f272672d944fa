"""What the batch scripts do by themselves. With a real Slurm, which takes minutes: tests/cluster."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.unit.agents.episodes import alive, wait_until

pytestmark = pytest.mark.slow("each runs a script")

JOB = {"SLURM_JOB_ID_HET_GROUP_1": "2", "SLURM_JOB_NAME": "ppo", "SLURM_JOB_ID": "1", "PROJECT_DIR": str(ROOT)}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"ACTOR_ARGS": ""}, "ACTOR_ARGS is empty"),
        ({"ACTOR_ARGS": "data.prompt_template=It's_{prompt} algorithm.max_steps=9"}, "ACTOR_ARGS cannot be split into words"),
        ({"CRITIC_ARGS": 'model.path="/m'}, "CRITIC_ARGS cannot be split into words"),
        ({"CRITIC_ARGS": "model.path='/m\n/n'"}, "CRITIC_ARGS cannot be split into words"),
        ({"OUTPUT_DIR": "/tmp/it's"}, "OUTPUT_DIR=/tmp/it's holds one of ' \\ $ %"),
        ({"OUTPUT_DIR": "/tmp/50%"}, "OUTPUT_DIR=/tmp/50% holds one of"),
        ({"SLURM_JOB_ID_HET_GROUP_1": ""}, "no heterogeneous Slurm job"),
        ({"CRITIC_RANKS": "eight"}, "CRITIC_RANKS=eight is not a number"),
        ({"STOP_GRACE_S": "5s"}, "STOP_GRACE_S=5s is not a number"),
        ({"GPUS_PER_ENGINE": "all"}, "GPUS_PER_ENGINE=all is not a number"),
        ({"BATCH_PYTHON": f"{sys.executable} -S", "PYTHONPATH": "", "PYTHONSAFEPATH": "1", "ACTOR_ARGS": ""}, "is empty"),
    ],
)  # fmt: skip
def test_it_refuses(arguments: dict[str, str], sentence: str, tmp_path: Path) -> None:
    given = {"CRITIC_ARGS": "model.path=/m", "ACTOR_ARGS": "model.path=/m", "OUTPUT_DIR": str(tmp_path), **JOB}
    done = subprocess.run(
        ["bash", ROOT / "slurm" / "ppo_hetjob.sh"], env={**os.environ, **given, **arguments}, capture_output=True, text=True
    )  # fmt: skip
    assert done.returncode == 2 and sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_it_prefers_the_python_of_the_actor(tmp_path: Path) -> None:
    for name, text in {
        "servers/serve_ppo_critic.py": "",
        ".venv-actor/bin/python": '#!/bin/sh\necho "ran $*"\n',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    given = {**os.environ, **JOB, "PROJECT_DIR": str(tmp_path)}
    (tmp_path / ".venv-actor/bin/python").chmod(0o755)
    done = subprocess.run(["bash", ROOT / "slurm" / "ppo_hetjob.sh"], env=given, capture_output=True, text=True)
    assert done.stdout == "ran -m nemo_style_rlhf.launch.slurm_job ppo\n"


COMPONENTS = ("serve_ppo_critic", "train_ppo_actor")
COMMANDS = {
    "scontrol": """
case "$1 $2" in
"show hostnames") echo n0 ;;
"show node") echo "NodeName=n0 NodeAddr=127.0.0.1" ;;
*) echo "$@" >>"$NOTES/orders" ;;
esac
""",
    "squeue": '[[ $SLURM_TIME_FORMAT == relative ]] && echo "Tomorr 12:00" || date --date="1 hour" +%FT%T',
    "openssl": f"""
[[ ${{OPENSSL:-}} != hangs ]] || {{ touch "$NOTES/openssl_runs"; exec sleep 600; }}
exec {shutil.which("openssl")} "$@"
""",
}
"""Stand-ins for Slurm's commands name a node and a time limit, and note other orders. The one for openssl may hang."""
SRUN = """
import itertools, os, signal, subprocess, sys

def send(number, _):
    if task is not None:
        os.killpg(task.pid, signal.SIGKILL if number == signal.SIGTERM else number)

task = None
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, send)
words = itertools.dropwhile(lambda word: word.startswith("-"), sys.argv[1:])
task = subprocess.Popen([*words], start_new_session=True)
code = task.wait()
sys.exit(code if code >= 0 else 128 - code)
"""
"""One task, whose every process has the signals that srun gets; SIGTERM becomes a SIGKILL."""
PROGRAM = """
import os, runpy, signal, sys, time
from pathlib import Path

if sys.argv[1:3] == ["-m", "nemo_style_rlhf.launch.slurm_node"]:
    sys.executable, sys.orig_argv, sys.argv = sys.argv[0], sys.argv, [sys.argv[0], *sys.argv[3:]]
    sys.path.insert(0, os.getcwd())
    runpy.run_module("nemo_style_rlhf.launch.slurm_node", run_name="__main__")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
(name,) = (Path(word).stem for word in sys.argv if word.endswith(".py"))
note = Path(os.environ["NOTES"]) / name
note.with_suffix(".tmp").write_text(str(os.getpid()))
note.with_suffix(".tmp").rename(note)
if (code := os.environ.get(f"CODE_{name}")) is not None:
    sys.exit(int(code))
time.sleep(600)
"""
"""Server, actor or torchrun: it notes its process id, and ends as they do, or at once with the code that it is given."""


class Job:
    """One of the batch scripts, as Slurm starts it."""

    def __init__(self, folder: Path, script: str, *arguments: str, log: str = "", **variables: str) -> None:
        self.folder = folder
        for name, text in COMMANDS.items():
            self._write(name, f"#!/usr/bin/env bash\n{text}")
        self._write("srun", f"#!{sys.executable}\n{SRUN}")
        python = self._write("python", f"#!{sys.executable}\n{PROGRAM}")
        environment = {
            **os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "NOTES": str(folder), "PROJECT_DIR": str(ROOT),
            "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "job", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", **variables,
            "BATCH_PYTHON": sys.executable, **dict.fromkeys(("CRITIC_PYTHON", "ACTOR_PYTHON", "STAGE_PYTHON"), str(python)),
        }  # fmt: skip
        command = ["bash", ROOT / "slurm" / script, *arguments]
        with open(log or folder / "log", "w") as output:
            self.process = subprocess.Popen(command, env=environment, stdout=output, start_new_session=True)

    def _write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def runs(self, *names: str) -> bool:
        """Whether the programs have started, and the script heeds signals."""
        return all((self.folder / name).exists() for name in names) and catches(self.process.pid, signal.SIGUSR1)

    def left(self, *names: str) -> list[str]:
        """The programs that still run."""
        noted = [self.folder / name for name in names if (self.folder / name).exists()]
        return [note.name for note in noted if alive(int(note.read_text()))]

    def require_requeued(self, *names: str) -> None:
        """It has ended its programs and asked Slurm once, and stays until Slurm ends it: else it may count as failed."""
        assert wait_until((self.folder / "orders").exists)
        assert (self.folder / "orders").read_text() == "requeue 7\n"
        assert self.process.poll() is None and self.left(*names) == []

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for name in self.left(*COMPONENTS, "train_sft"):
            os.kill(int((self.folder / name).read_text()), signal.SIGKILL)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def started(*words: str, **variables: str) -> Job:
        jobs.append(Job(tmp_path, *words, **variables))
        return jobs[-1]

    yield started
    for job in jobs:
        job.end()


def supervised(start: Callable[..., Job]) -> Job:
    return start("supervised.sh", "trainers/train_sft.py", SLURM_JOB_NODELIST="n0", SLURM_JOB_NUM_NODES="1")


def hetjob(start: Callable[..., Job], folder: Path, **variables: str) -> Job:
    nodes = {f"SLURM_JOB_{name}_HET_GROUP_{group}": "1" for name in ("NUM_NODES", "NODELIST") for group in (0, 1)}
    given = {"CRITIC_ARGS": "model.path=/m", "ACTOR_ARGS": "model.path=/m", "OUTPUT_DIR": str(folder / "outputs")}
    return start("ppo_hetjob.sh", SLURM_JOB_ID_HET_GROUP_1="8", **nodes, **given, **variables)


def test_a_supervised_job_that_is_told_of_its_end_is_requeued(start: Callable[..., Job]) -> None:
    job = supervised(start)
    assert wait_until(lambda: job.runs("train_sft"))
    job.process.send_signal(signal.SIGUSR1)
    job.require_requeued("train_sft")


@pytest.mark.parametrize("log", ["", "/dev/full"])
def test_a_hetjob_that_is_told_of_its_end_is_requeued(start: Callable[..., Job], tmp_path: Path, log: str) -> None:
    """Once its actor has committed a checkpoint, which exit code 75 says. The disk of the job's log may be full."""
    job = hetjob(start, tmp_path, log=log)
    assert wait_until(lambda: job.runs(*COMPONENTS))
    job.process.send_signal(signal.SIGUSR1)
    job.require_requeued(*COMPONENTS)


def test_a_hetjob_does_not_wait_beyond_its_time_limit(start: Callable[..., Job], tmp_path: Path) -> None:
    """However its user has Slurm print times."""
    job = hetjob(start, tmp_path, REQUEUE_MARGIN_S="3600", SLURM_TIME_FORMAT="relative")
    assert wait_until(lambda: job.runs(*COMPONENTS))
    job.process.send_signal(signal.SIGUSR1)
    job.require_requeued(*COMPONENTS)
    assert "no checkpoint within the time: " in (tmp_path / "log").read_text()


def test_a_hetjob_that_is_canceled_while_it_makes_certificates_leaves_no_key(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    job = hetjob(start, tmp_path, OPENSSL="hangs")
    assert wait_until((tmp_path / "openssl_runs").exists)
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(60) == 143 and "SIGTERM" in (tmp_path / "log").read_text()
    assert not list((tmp_path / "outputs").glob("tls-*"))


@pytest.mark.parametrize(
    ("codes", "expected"),
    [({"CODE_train_ppo_actor": "0"}, 0), ({"CODE_train_ppo_actor": "3"}, 3), ({"CODE_serve_ppo_critic": "4"}, 4)],
    ids=str,
)
def test_a_hetjob_ends_with_the_first_of_its_components(
    start: Callable[..., Job], tmp_path: Path, codes: dict[str, str], expected: int
) -> None:
    job = hetjob(start, tmp_path, **codes)
    assert job.process.wait(60) == expected
    assert job.left(*COMPONENTS) == [] and not (tmp_path / "orders").exists()


def catches(pid: int, number: int) -> bool:
    """Whether a process handles a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(mask, 16) >> (number - 1) & 1)
