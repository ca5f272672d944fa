"""A run.output_dir has one owner: real processes, stopped, killed, and on what they take for another machine."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from nemo_style_rlhf.launch.program import Program, server, trainer
from tests.support.metrics import metrics, without_timers
from tests.support.models import save_policy, save_reward_model
from tests.support.processes import Process, suspend, wait_for_output

STEPS = 8
TAKEOVER_S = 10
Start = Callable[..., Process]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("owner_inputs")
    save_policy(folder / "policy")
    save_reward_model(folder / "reward")
    for name, row in (("prompts", {"prompt": "w1 w2"}), ("texts", {"prompt": "w1 w2", "response": "w3 w4"})):
        (folder / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 40)
    (folder / "reward.py").write_text(
        "def reward_func(queries, prompts, labels):\n    return [float(len(query)) for query in queries]\n"
    )
    return folder


def program(inputs: Path, kind: str, folder: Path, takeover_s: float = TAKEOVER_S) -> Program:
    common = [f"run.takeover_s={takeover_s}", "run.num_threads=1"]
    policy = ["model.dtype=float32", f"model.path={inputs / 'policy'}"]
    if kind == "actor":
        return trainer(
            "train_ppo_actor", folder, *common, *policy, f"data.train_path={inputs / 'prompts.jsonl'}", "algorithm=grpo",
            "algorithm.samples_per_prompt=4", "algorithm.num_rollout_samples=8", f"algorithm.max_steps={STEPS}",
            "generation=hf", "generation.max_length=8", "engine.optim.lr=1e-3", "reward=function",
            f"reward.function.path={inputs / 'reward.py'}", "checkpoint.save_interval=1",
        )  # fmt: skip
    if kind == "stage":
        return trainer(
            "train_sft", folder, *common, *policy, f"data.train_path={inputs / 'texts.jsonl'}", "trainer.max_steps=20",
            "trainer.batch_size=4", "checkpoint.save_interval=1", "trainer.log_interval=1",
        )  # fmt: skip
    if kind == "evaluation":
        return trainer(
            "evaluate", folder, *common, "model=fp32", f"data.path={inputs / 'prompts.jsonl'}",
            f"checkpoints=[{inputs / 'policy'}]", "generation=hf", "generation.max_length=8",
        )  # fmt: skip
    critic = server("serve_ppo_critic", folder, *common, "model.dtype=float32", f"model.path={inputs / 'reward'}")
    return replace(critic, ready_file=None)  # a second start must not remove the first one's


@pytest.fixture
def start(inputs: Path, tmp_path: Path) -> Iterator[Start]:
    """``start(kind)``: a process on ``tmp_path / "run"``, its log beside; with ``elsewhere=True`` on another machine."""
    started: list[Process] = []

    def process(kind: str, *, elsewhere: bool = False, takeover_s: float = TAKEOVER_S) -> Process:
        log = tmp_path / f"{len(started)}.log"
        cold = None
        if elsewhere:
            (tmp_path / "boot_id").write_text("11111111-2222-3333-4444-555555555555\n")
            as_elsewhere = 'hostname elsewhere && mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"'
            namespaces = ["unshare", "--map-root-user", "--mount", "--uts", "sh", "-c", as_elsewhere]
            cold = [*namespaces, str(tmp_path / "boot_id")]
        started.append(Process(program(inputs, kind, tmp_path / "run", takeover_s), log, cold=cold))
        return started[-1]

    yield process
    for each in started:
        for child in psutil.Process(each.pid).children(recursive=True) if psutil.pid_exists(each.pid) else []:
            child.kill()
        each.kill()


def owner(folder: Path, role: str) -> int:
    """Its process id; 0 as long as there is none."""
    record = folder / "run" / f".owner_{role}.json"
    return int(json.loads(record.read_bytes())["pid"]) if record.exists() else 0


def wait_until(condition: Callable[[], object], *processes: Process) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline and all(each.poll() is None for each in processes), [
            each.output() for each in processes
        ]
        time.sleep(0.02)


def contents(folder: Path) -> dict[Path, tuple[int, int]]:
    """Size and time of every file."""
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("kind", "role", "under_way"),
    [
        ("actor", "trainer", f"GRPO 2/{STEPS}"),
        ("stage", "trainer", "rows"),
        ("evaluation", "evaluation", "rows"),
        ("server", "server", "serving critic"),
    ],
)
def test_a_second_one_is_refused_before_it_touches_anything(
    start: Start, tmp_path: Path, kind: str, role: str, under_way: str
) -> None:
    """The first is stopped meanwhile with its children, which makes it no less the owner, and goes on to its end."""
    first = start(kind)
    wait_for_output(first, under_way)
    stopped = [psutil.Process(first.pid), *psutil.Process(first.pid).children(recursive=True)]
    suspend(stopped)
    before = contents(tmp_path / "run")
    second = start(kind)
    assert second.wait(120) == 2, second.output()
    (sentence,) = [line for line in second.output().splitlines() if "error: " in line]
    assert f"run.output_dir={tmp_path / 'run'} is in use by another {role} (process {first.pid} on " in sentence
    assert contents(tmp_path / "run") == before
    for each in stopped:
        each.resume()
    if kind == "server":
        assert first.terminate() == 0, first.output()
    else:
        assert first.wait(200) == 0, first.output()
    assert owner(tmp_path, role) == 0


@pytest.mark.parametrize(("kind", "role"), [("actor", "trainer"), ("server", "server")])
def test_one_that_was_killed_is_followed_at_once_whatever_its_children_do(
    start: Start, tmp_path: Path, kind: str, role: str
) -> None:
    """Long before the time is over in which another machine might still live."""
    first = start(kind, takeover_s=3600)
    wait_for_output(first, {"actor": f"GRPO 2/{STEPS}", "server": "serving critic"}[kind])
    children = psutil.Process(first.pid).children(recursive=True)
    assert children
    for child in children:
        child.suspend()
    first.signal(signal.SIGKILL)
    second = start(kind, takeover_s=3600)
    try:
        wait_until(lambda: owner(tmp_path, role) == second.pid, second)
        assert any(child.is_running() and child.status() == psutil.STATUS_STOPPED for child in children)
        wait_for_output(second, {"actor": "resumed from step", "server": "serving critic"}[kind])
    finally:
        for child in children:
            child.kill() if child.is_running() else None


def test_another_machine_takes_a_stopped_actors_run_to_its_end_and_the_first_ends_in_one_sentence(
    start: Start, inputs: Path, tmp_path: Path
) -> None:
    (tmp_path / "undisturbed").mkdir()
    whole = Process(program(inputs, "actor", tmp_path / "undisturbed"), tmp_path / "log")
    assert whole.wait(200) == 0, whole.output()
    first = start("actor")
    wait_until(lambda: (tmp_path / "run/checkpoints/step_000002/manifest.json").exists(), first)
    first.signal(signal.SIGSTOP)
    second = start("actor", elsewhere=True)
    wait_for_output(second, "resumed from step")
    assert " on elsewhere" not in second.output() and f"was owned by process {first.pid} on " in second.output()
    first.signal(signal.SIGCONT)
    assert first.wait(60) == 2, first.output()
    errors = [line for line in first.output().splitlines() if "error: " in line]
    assert (
        len(errors) == 1
        and "is no longer this process's to write to" in errors[0]
        and "Traceback" not in first.output()
    )
    assert second.wait(200) == 0, second.output()
    assert without_timers(metrics(tmp_path / "run")) == without_timers(metrics(tmp_path / "undisturbed"))
    exports = [(tmp_path / run / "export/model.safetensors").read_bytes() for run in ("run", "undisturbed")]
    assert exports[0] == exports[1]


def test_a_server_that_stood_still_ends_in_one_sentence_once_another_machines_serves(
    start: Start, tmp_path: Path
) -> None:
    """While the first lives the other machine is refused."""
    first = start("server")
    wait_for_output(first, "serving critic")
    refused = start("server", elsewhere=True)
    assert refused.wait(100) == 2 and f"in use by another server (process {first.pid} on " in refused.output()
    first.signal(signal.SIGSTOP)
    second = start("server", elsewhere=True)
    wait_for_output(second, "serving critic")
    before = contents(tmp_path / "run")
    first.signal(signal.SIGCONT)
    assert first.wait(30) == 1, first.output()
    (sentence,) = [line for line in first.output().splitlines() if "ERROR" in line]
    assert "is no longer this process's to write to: it is in use by process" in sentence and "elsewhere" in sentence
    assert contents(tmp_path / "run").keys() >= before.keys()
    assert second.poll() is None and owner(tmp_path, "server") == second.pid
    assert second.terminate() == 0


def test_the_actor_is_refused_in_the_servers_folder_and_changes_nothing_there(start: Start, tmp_path: Path) -> None:
    """Both record their configurations there, by which exports and the page read what else is in the folder."""
    server = start("server")
    wait_for_output(server, "serving critic")
    before = (tmp_path / "run/config.yaml").read_bytes()
    actor = start("actor")
    assert actor.wait(100) == 2, actor.output()
    (sentence,) = [line for line in actor.output().splitlines() if "error: " in line]
    assert (
        "holds the run of a server, this is a PPO trainer: " in sentence and "choose another run.output_dir" in sentence
    )
    assert (tmp_path / "run/config.yaml").read_bytes() == before
    assert server.terminate() == 0
