"""`sbatch slurm/ppo_hetjob.sh` on a real Slurm: it completes, dies as one, and goes on after the time limit."""

import contextlib
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from tests.cluster.jobs import Job, Overrides, submit, tiny
from tests.cluster.slurm import Cluster, wait_until
from tests.support.metrics import metrics, without_timers
from tests.support.processes import run_pair

pytestmark = pytest.mark.more

CRITIC_RANKS = "2"
RUN_S = 300.0
JOINT_DEATH_S = 10.0
TOKEN_ENV = "NSR_CRITIC_TOKEN"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Overrides:
    return tiny(tmp_path_factory.mktemp("inputs"))


def processes(job: Job, script: str = "") -> list[psutil.Process]:
    """Those of the job's two programs, or of the one whose command line names ``script``, without slurm_node.py."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        ours = {f"run.output_dir='{job.output_dir / part}'" for part in ("critic", "actor")} & set(words)
        if ours and "-m" not in words and script in " ".join(words) and Path(words[0]).name.startswith("python"):
            found.append(process)
    return found


def told_to_end(process: psutil.Process) -> bool:
    """Whether SIGUSR1, the tenth of the signals in the kernel's masks, waits for it."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return any(int(mask, 16) & 1 << signal.SIGUSR1 - 1 for mask in re.findall(r"(?:SigPnd|ShdPnd):\s+(\w+)", status))


def token_of(process: psutil.Process) -> str:
    return process.environ()[TOKEN_ENV]


@pytest.fixture(scope="module")
def completed(cluster, inputs, tmp_path_factory) -> tuple[Job, str]:
    """A job that nobody disturbs, and its token as its processes had it in their environment."""
    job = submit(
        cluster, inputs, tmp_path_factory.mktemp("completed") / "lr=1e-3,a", "--time=60", CRITIC_RANKS=CRITIC_RANKS
    )
    job.wait_for_step(2)
    tokens = {token_of(process) for process in processes(job)}
    assert len(tokens) == 1
    token = tokens.pop()
    for process in psutil.process_iter(["cmdline"]):
        assert token not in " ".join(process.info["cmdline"] or [])
    job.wait_for_end(RUN_S)
    return job, token


def test_a_job_completes_on_two_nodes_and_leaves_them_at_once(completed):
    job, _ = completed
    components = [job.fields(0), job.fields(1)]
    assert [fields["JobState"] for fields in components] == ["COMPLETED"] * 2, job.report()
    assert components[0]["ExitCode"] == "0:0"
    assert components[0]["NodeList"] != components[1]["NodeList"]
    exported = (job.output_dir / "actor" / "export" / "model.safetensors").stat().st_mtime
    for fields in components:
        assert datetime.fromisoformat(fields["EndTime"]).timestamp() - exported < JOINT_DEATH_S
    assert "received SIGTERM" in (job.output_dir / "critic.log").read_text()
    assert "serving critic and reward at https://" in (job.output_dir / "critic.log").read_text()
    assert not list(job.output_dir.glob("tls-*"))
    assert "the critic ended" not in job.log.read_text()
    assert not processes(job)


def test_a_job_learns_what_the_two_commands_learn(completed, inputs, tmp_path):
    run_pair(tmp_path, inputs.critic, inputs.actor, server_ranks=int(CRITIC_RANKS))
    weights = [folder / "actor" / "export" / "model.safetensors" for folder in (completed[0].output_dir, tmp_path)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert without_timers(metrics(tmp_path / "actor")) == without_timers(completed[0].rows())


def test_the_token_is_in_no_file(completed, cluster):
    job, token = completed
    assert len(token) == 64
    for folder in (job.output_dir.parent, cluster.folder):
        for file in folder.rglob("*"):
            if file.is_file() and file.stat().st_size < 2**20:
                assert token.encode() not in file.read_bytes(), file


def test_engines_are_a_third_component_and_one_that_dies_is_started_again(completed, cluster, inputs, tmp_path):
    """The weights are those of a job without engines."""
    third = ["--time=60", ":", "--nodes=1", ":", "--nodes=1"]
    job = submit(cluster, inputs, tmp_path / "a run", *third, CRITIC_RANKS=CRITIC_RANKS, ENGINES_PER_NODE="2")
    job.wait_for_step(1)
    (actor,) = processes(job, "train_ppo_actor.py")
    actor.suspend()
    ready = job.output_dir / "actor" / "engines" / "engine-1.json"
    wait_until(ready.exists, "the second engine is ready", RUN_S)
    killed = json.loads(ready.read_text())["pid"]
    os.kill(killed, signal.SIGKILL)
    actor.resume()
    job.wait_for_end(RUN_S)
    assert job.state == "COMPLETED", job.report()
    nodes = {job.fields(component)["NodeList"] for component in range(3)}
    assert len(nodes) == 3
    assert "engine-1 was ended by SIGKILL and is started again" in (job.output_dir / "engines.log").read_text()
    assert "engine engine-1 is lost" in (job.output_dir / "actor.log").read_text()
    assert not psutil.pid_exists(killed) and not [
        each for each in psutil.process_iter(["cmdline"]) if serves(each, job)
    ]
    weights = [run.output_dir / "actor" / "export" / "model.safetensors" for run in (job, completed[0])]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def serves(process: psutil.Process, job: Job) -> bool:
    """Whether it is an engine of the job."""
    return f"--config-dir={job.output_dir / 'actor' / 'engines'}" in (process.info["cmdline"] or [])


def cancel_component(job: Job) -> None:
    job.cluster.run("scancel", f"{job.number}+1")


def cancel_step(job: Job) -> None:
    with contextlib.suppress(RuntimeError):  # ends the step, and complains that the other component has none of this id
        job.cluster.run("scancel", job.steps()["critic"])


def kill_server(job: Job) -> None:
    for process in processes(job, "serve_ppo_critic"):
        process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("end_one", [cancel_component, cancel_step, kill_server])
def test_the_end_of_one_component_ends_both(cluster, inputs, tmp_path, end_one: Callable[[Job], None]):
    job = submit(cluster, inputs.endless, tmp_path / "run", "--time=60")
    job.wait_for_step(1)
    end_one(job)
    seconds = job.wait_for_end(60)
    print(f"{end_one.__name__}: both ended after {seconds:.1f} s")
    assert seconds < JOINT_DEATH_S, job.report()
    assert job.state in {"FAILED", "CANCELLED"}
    assert not processes(job)
    assert "ended with exit code" in job.log.read_text()


def test_a_time_limit_requeues_and_the_resumed_job_ends_with_the_same_weights(completed, cluster, inputs, tmp_path):
    """The actor stands still until Slurm's signal has come: slurmctld looks at time limits twice a minute."""
    job = submit(cluster, inputs, tmp_path / "run", "--time=60", CRITIC_RANKS=CRITIC_RANKS)
    job.wait_for_step(1)
    (actor,) = processes(job, "train_ppo_actor.py")
    actor.suspend()
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=5")  # the signal comes ten minutes before
    wait_until(lambda: told_to_end(actor), "the actor has SIGUSR1", RUN_S)
    actor.resume()
    job.wait_for_requeue(RUN_S)
    steps = len(job.rows())
    assert 0 < steps < len(completed[0].rows()), job.report()
    assert not (job.output_dir / "actor" / "export").exists()
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")
    cluster.start_soon(job.number)
    job.wait_for_end(RUN_S)
    assert job.state == "COMPLETED", job.report()
    assert f"resumed from step {steps}" in (job.output_dir / "actor.log").read_text()
    weights = [run.output_dir / "actor" / "export" / "model.safetensors" for run in (job, completed[0])]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    rewards = [[row["train_rollouts/rewards"] for row in run.rows()] for run in (job, completed[0])]
    assert rewards[0] == rewards[1]


def test_an_actor_of_two_ranks_that_is_told_to_end_early_is_requeued(cluster, inputs, tmp_path):
    job = submit(cluster, inputs.endless, tmp_path / "run", "--time=60", ACTOR_RANKS="2", ACTOR_SETUP="set -e; sleep 1")
    job.wait_for_step(1)
    cluster.run("scancel", "--batch", "--signal=USR1", str(job.number))
    job.wait_for_requeue(RUN_S)
    assert f"step {len(job.rows())} is committed" in (job.output_dir / "actor.log").read_text()
    assert not processes(job)
    cluster.run("scancel", str(job.number))
