"""PPO on a real Ray cluster of three raylets: as the same commands by hand, whatever dies, and with nothing left at the end."""

import http.client
import re
import ssl
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc
import psutil
import pytest

from nemo_style_rlhf.launch.local import Child
from nemo_style_rlhf.launch.program import ACTOR_PYTHON, Program
from tests.cluster.ray_nodes import RAY, RayNodes
from tests.cluster.slurm import wait_until
from tests.support import ppo_runs
from tests.support.critic_server import left_of
from tests.support.paths import ROOT
from tests.support.ppo_runs import launched, launched_actor, left_on_disk, result, segments
from tests.support.processes import run_pair

pytestmark = pytest.mark.more

SCRIPT = str(ROOT / "trainers" / "train_ppo_ray.py")
RUN_S = 600.0
END_S = 120.0
RAYS_CALLS = (
    "InternalKVGcsService/InternalKVKeys", "NodeManagerService/GetNodeStats", "ObjectManagerService/Pull",
    "CoreWorkerService/PushTask", "RayletDriver/PrepRuntimeEnv", "LogService/ListLogs",
)  # fmt: skip
NOT_THERE = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE)
SCRIPTS = ("train_ppo_actor.py", "serve_ppo_critic.py", "serve_engine.py")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    with RayNodes() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ppo_runs.save_inputs(tmp_path_factory.mktemp("ray_runs") / "inputs")


class RayRun(Child):
    """The command, or the submission of it, and the processes of the run."""

    def __init__(self, cluster: RayNodes, folder: Path, command: list[str], *words: str) -> None:
        self.folder = folder
        argv = [*command, str(ACTOR_PYTHON), SCRIPT, f"run.output_dir={folder}", *words]
        environment = {name: value for name, value in cluster.environment.items() if name.startswith("RAY_")}
        elsewhere = folder.parent / "elsewhere"
        elsewhere.mkdir()
        super().__init__(Program("run", argv, environment, folder=elsewhere), folder.with_suffix(".log"))

    def wait_for(self, found: Callable[[], object], what: str) -> None:
        def there() -> bool:
            assert self.poll() is None, self.report()
            return bool(found())

        wait_until(there, what, RUN_S)

    def wait_for_step(self, step: int) -> None:
        path = self.folder / "actor" / "rollouts" / f"step_{step:06d}.parquet"
        self.wait_for(path.exists, f"step {step}")

    def processes(self, *scripts: str) -> list[psutil.Process]:
        """Those that run ``scripts``, all of the run by default."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            ours = any(f"--config-dir={self.folder / part}" in words for part in ("configs", "actor/engines"))
            if ours and any(script in " ".join(words) for script in scripts or SCRIPTS):
                found.append(process)
        return found

    def process(self, script: str) -> psutil.Process:
        (found,) = self.processes(script)
        return found

    def report(self) -> str:
        logs = [self.log, *sorted(self.folder.glob("*.log"))]
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}" for log in logs)


@pytest.fixture
def start(cluster: RayNodes, tmp_path: Path) -> Iterator[Callable[..., RayRun]]:
    started: list[RayRun] = []

    def start(*words: str, submitted: bool = False) -> RayRun:
        job = [RAY, "job", "submit", f"--address={cluster.dashboard}", f"--submission-id={tmp_path.name}", "--"]
        command = job if submitted else []
        started.append(RayRun(cluster, tmp_path / "run", command, *words))
        return started[-1]

    yield start
    for each in started:
        end(each)


@pytest.fixture(scope="module")
def running(cluster: RayNodes, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayRun]:
    """A run that has made its first step, and ends with its cluster."""
    folder = tmp_path_factory.mktemp("running") / "run"
    run = RayRun(cluster, folder, [], *launched(inputs), "algorithm.max_steps=1000", on_cluster(cluster))
    run.wait_for_step(1)
    yield run
    end(run)


def end(run: RayRun) -> None:
    run.stop()
    for process in run.processes():
        process.kill()


def on_cluster(cluster: RayNodes) -> str:
    return f"ray.address={cluster.address}"


def gpus_of(process: psutil.Process) -> list[str]:
    return process.environ()["CUDA_VISIBLE_DEVICES"].split(",")


def host_of(process: psutil.Process) -> str:
    """The address on which a server listens."""
    (word,) = (word for word in process.cmdline() if word.startswith("server.host="))
    return word.partition("=")[2]


@pytest.fixture(scope="module")
def open_cluster() -> Iterator[RayNodes]:
    """A head that lets strangers in, without a CPU."""
    with RayNodes(workers=0, mode="disabled") as nodes:
        yield nodes


MISTAKES = {
    "no cluster": (["ray.address=127.0.0.1:1"], r"no Ray cluster answers at ray\.address=127\.0\.0\.1:1: give"),
    "no token": ([], r"the Ray cluster at .* answers callers without a token: .* RAY_AUTH_MODE=token"),
    "too small": (
        ["ray.require_token=false", "ray.wait_s=2", "ranks=3"],
        r"no nodes could hold the run, which needs 1 CPU; 3 CPUs; 1 CPU, within .* the cluster has 1 node \(0 CPUs\), "
        r"of which .*: Ray counts ray\.cpus for each process, 5 CPUs in all, 3 of them on one node: .*`ray start --num-cpus`",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake, open_cluster, inputs, tmp_path):
    words, sentence = MISTAKES[mistake]
    run = RayRun(open_cluster, tmp_path / "run", [], *launched(inputs), on_cluster(open_cluster), *words)
    assert run.wait(END_S) == 2, run.output()
    (error,) = (line for line in run.output().splitlines() if "error" in line or "Traceback" in line)
    assert re.match(f"error: {sentence}", error), error
    assert not (run.folder / "secrets").exists()


def test_one_machine_holds_a_run_if_its_head_counts_a_cpu_for_each_process(inputs, tmp_path):
    with RayNodes(workers=0, head_cpus=3) as alone:
        words = [*launched(inputs), on_cluster(alone), "algorithm.max_steps=1", "algorithm.critic_warmup_steps=0"]
        run = RayRun(alone, tmp_path / "run", [], *words, "ray.wait_s=20", "engine.scheduler.total_steps=4")
        try:
            assert run.wait(RUN_S) == 0, run.report()
        finally:
            end(run)


def test_a_submitted_job_whose_processes_are_killed_ends_as_the_two_commands_by_hand(cluster, inputs, start, tmp_path):
    undisturbed = tmp_path / "two_commands"
    run_pair(undisturbed, ppo_runs.server_overrides(inputs), launched_actor(inputs))
    run = start(*launched(inputs), "placement=colocated", submitted=True)
    run.wait_for_step(1)
    servers = [run.process("serve_ppo_critic")]
    assert host_of(servers[0]) in ("127.0.0.2", "127.0.0.3")
    assert [gpus_of(process) for process in run.processes()] == [gpus_of(servers[0])] * 3 and len(
        gpus_of(servers[0])
    ) == 1
    run.process("serve_engine").kill()
    servers[0].kill()
    run.wait_for_step(3)
    servers.append(run.process("serve_ppo_critic"))
    run.process("train_ppo_actor").kill()
    assert run.wait(RUN_S) == 0, run.report()
    for dead in ("engine-0", "critic", "actor"):
        assert run.output().count(f"{dead} was ended by SIGKILL and is started again") == 1, run.report()
    assert not left_of(run.processes())
    assert segments(run.folder, [server.pid for server in servers]) == [] == left_on_disk(run.folder)
    assert not (run.folder / "secrets").exists()
    assert result(run.folder) == result(undisturbed)
    assert "succeeded" in cluster.run("job", "status", f"--address={cluster.dashboard}", tmp_path.name)
    shown = "".join(path.read_text() for path in cluster.folder.glob("ray/session_latest/logs/worker-*.out"))
    assert "resumed from step" in shown and "serving critic and reward at https://" in shown
    actors = cluster.run("list", "actors", f"--address={cluster.dashboard}")
    assert all(f"{name} (start " in actors for name in ("critic", "engine-0", "actor"))


def test_a_lost_node_takes_no_bit_from_a_run_of_two_nodes(cluster, inputs, start, tmp_path):
    """The actor has a rank on each of two nodes. The raylet dies of the one with the critic server, which goes to the other."""
    undisturbed = tmp_path / "by_hand"
    run_pair(undisturbed, ppo_runs.server_overrides(inputs), launched_actor(inputs), ranks=2)
    run = start(*launched(inputs), "ranks=2", "ray.actor_nodes=2", on_cluster(cluster))
    run.wait_for_step(1)
    server = run.process("serve_ppo_critic")
    lost, started = host_of(server), run.processes()
    ranks = run.processes("train_ppo_actor")
    assert [rank.environ()["LOCAL_RANK"] for rank in ranks] == ["0", "0"]
    assert all(len(gpus_of(process)) == 1 for process in started)
    cluster.node_at(lost).daemon("raylet").kill()
    assert run.wait(RUN_S) == 0, run.report()
    assert f"critic was lost on node {lost} and is started again" in run.output(), run.output()
    assert "resumed from step" in (run.folder / "actor.log").read_text()
    assert not left_of([*started, *run.processes()])
    assert result(run.folder) == result(undisturbed)
    cluster.node_at(lost).kill()
    cluster.add_node()


def test_a_stopped_job_leaves_nothing(cluster, inputs, start, tmp_path):
    run = start(*launched(inputs), submitted=True)
    run.wait_for_step(1)
    started = run.processes()
    assert len(started) >= 3
    cluster.run("job", "stop", f"--address={cluster.dashboard}", tmp_path.name)
    wait_until(lambda: not run.processes(), "no process of the run is left", END_S)
    assert not left_of(started)


def listening(processes: list[psutil.Process]) -> dict[tuple[str, int], str]:
    """The name of the process that listens at each address and port."""
    found = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            for connection in process.net_connections("tcp"):
                if connection.status == "LISTEN":
                    address = connection.laddr.ip.removeprefix("::ffff:")
                    found["127.0.0.1" if address in ("::", "0.0.0.0") else address, connection.laddr.port] = (
                        process.name()
                    )
    return found


def page_for_strangers(url: str) -> str:
    """What a server tells a caller without a token; nothing if it refuses, or does not answer."""
    try:
        with urllib.request.urlopen(url, timeout=10, context=ssl._create_unverified_context()) as answer:
            return answer.read(1000).decode()
    except (OSError, http.client.HTTPException):
        return ""


def call_as_a_stranger(address: str, port: int, call: str) -> grpc.StatusCode | None:
    """How a call without a token is refused; None if it is answered."""
    with grpc.insecure_channel(f"{address}:{port}") as channel:
        try:
            channel.unary_unary(f"/ray.rpc.{call}")(b"", timeout=END_S)  # a busy machine answers late
        except grpc.RpcError as error:
            return error.code()  # type: ignore[attr-defined]
    return None


def refusals(name: str, address: str, port: int, table: str) -> set[str]:
    """The calls that one of Ray's programs knows and refuses."""
    assert f"`{name}`" in table
    page = page_for_strangers(f"http://{address}:{port}/")
    assert not page or page.startswith(("# HELP ", "<!doctype html>")), (name, page)
    assert not (page.startswith("<") and page_for_strangers(f"http://{address}:{port}/api/jobs/")), name
    codes = {call: call_as_a_stranger(address, port, call) for call in (() if page else RAYS_CALLS)}
    assert all(code in (*NOT_THERE, grpc.StatusCode.UNAUTHENTICATED) for code in codes.values()), (name, codes)
    return {call for call, code in codes.items() if code is grpc.StatusCode.UNAUTHENTICATED}


def test_no_port_tells_strangers_more_than_the_documentation_says(cluster, running):
    """Each of Ray's programs knows one of the calls, and refuses it; the pages that it shows everybody are in docs/ray.md."""
    started = [each for process in running.processes() for each in [process, *process.children(recursive=True)]]
    ours = listening(started)
    rays = listening([each for node in cluster.nodes for each in node.processes() if each not in started])
    assert len(ours) >= 2, running.report()
    table = (ROOT / "docs" / "ray.md").read_text()
    with ThreadPoolExecutor(16) as pool:  # most say nothing until the time is over
        pages = pool.map(
            page_for_strangers, [f"{scheme}://{host}:{port}/" for host, port in ours for scheme in ("http", "https")]
        )
        refused = pool.map(lambda port: refusals(rays[port], *port, table), rays)
        assert not any(pages)
        assert set().union(*refused) == {*RAYS_CALLS}


def test_the_loss_of_the_head_ends_everything(cluster, running):
    started = running.processes()
    cluster.nodes[0].kill()
    wait_until(lambda: not running.processes(), "no process of the run is left", END_S)
    assert not left_of(started)
    assert running.wait(END_S) != 0
