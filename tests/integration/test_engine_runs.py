"""A PPO run whose samples come from generation engines ends with the bits of one that samples in the trainer's process."""

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from subprocess import TimeoutExpired

import psutil
import pytest

from nemo_style_rlhf.launch.interrupt import weights_in_memory
from nemo_style_rlhf.launch.program import ACTOR_PYTHON, ROOT, Program
from tests.support import ppo_runs
from tests.support.certificates import certificate
from tests.support.metrics import metrics, without_timers
from tests.support.processes import Process, held_to, start_actor, start_server

FILTERED = ["algorithm.filter.low=-100", "algorithm.filter.high=100"]
"""Rounds of dynamic sampling, which drop nobody: a filter waits for scores within the step."""
LONG = 30
"""Steps that last minutes if the engine is slow."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ppo_runs.save_inputs(tmp_path_factory.mktemp("engine_runs") / "inputs")


def overrides(inputs: Path, engines: int) -> list[str]:
    return [*ppo_runs.actor_overrides(inputs), *FILTERED, f"generation.engines.count={engines}"]


def result(folder: Path, steps: int = ppo_runs.STEPS) -> tuple[object, ...]:
    """Everything that a run of so many steps has learned and logged."""
    actor = folder / "actor"
    files = [*sorted((actor / "rollouts").glob("*.parquet")), *sorted((actor / "export").glob("*.safetensors"))]
    exported = [*sorted((folder / "critic").rglob("*.safetensors"))]
    assert len(files) == steps + 1 and exported
    return without_timers(metrics(actor)), [path.read_bytes() for path in [*files, *exported]]


@pytest.fixture(scope="module")
def in_process(undisturbed: Callable[..., Path]) -> tuple[object, ...]:
    return result(undisturbed("filtered", *FILTERED))


def test_it_learns_the_same_with_engines(inputs, in_process, tmp_path) -> None:
    """One of them is killed while it starts."""
    critic, port = start_server(tmp_path / "critic", *ppo_runs.server_overrides(inputs))
    actor = start_actor(tmp_path / "actor", port, *overrides(inputs, 2))
    try:
        ready = tmp_path / "actor" / "engines" / "engine-1.json"
        words = f"server.ready_file={ready}"
        while not (
            starting := [each for each in psutil.process_iter(["cmdline"]) if words in (each.info["cmdline"] or [])]
        ):
            assert actor.poll() is None, actor.output()
        starting[0].kill()
        assert not ready.exists()
        assert actor.wait(240) == 0, actor.output()
    finally:
        actor.kill()
        assert critic.terminate() == 0
    assert "engine engine-1 is lost: it was ended by SIGKILL" in actor.output()
    assert result(tmp_path) == in_process
    manifest = next((tmp_path / "actor" / "checkpoints").glob("*/manifest.json"))
    assert not weights_in_memory(json.loads(manifest.read_text())["run_id"]).exists()
    assert not list((tmp_path / "actor" / "engines").glob("*.json"))  # every engine has ended by itself


@pytest.mark.more
def test_an_engine_that_gets_little_of_the_cpu_is_waited_for(inputs, undisturbed, tmp_path) -> None:
    """5 % of the time, for two minutes; one loss would end the run. test_engines.py has calls that last longer than limits."""
    folder, longer = tmp_path / "actor", f"algorithm.max_steps={LONG}"
    limits = ["restarts=0", "hung_after_s=15", "request_timeout_s=30"]
    critic, port = start_server(tmp_path / "critic", *ppo_runs.server_overrides(inputs))
    limits = [f"generation.engines.{limit}" for limit in limits]
    actor = start_actor(folder, port, *overrides(inputs, 1), longer, *limits)
    try:
        wait_for_rollouts(actor, folder, 1)
        pid = json.loads((folder / "engines" / "engine-0.json").read_text())["pid"]
        with held_to(0.05, pid), suppress(TimeoutExpired):
            actor.wait(120)
        assert actor.wait(240) == 0, actor.output()
    finally:
        actor.kill()
        assert critic.terminate() == 0
    assert "is lost" not in actor.output()
    assert result(tmp_path, LONG) == result(undisturbed("long", *FILTERED, longer), LONG)


@pytest.mark.more
def test_weights_that_all_engines_receive_at_once(inputs, in_process, tmp_path) -> None:
    """Their group meets again after one of them was killed."""
    folder = tmp_path / "actor"
    critic, port = start_server(tmp_path / "critic", *ppo_runs.server_overrides(inputs))
    actor = start_actor(folder, port, *overrides(inputs, 2), "generation.engines.weights=gloo")
    try:
        wait_for(folder / "engines" / "engine-1.json", actor)
        wait_for_rollouts(actor, folder, 3)
        kill_engine(actor, folder, 0)
        assert actor.wait(240) == 0, actor.output()
    finally:
        actor.kill()
        assert critic.terminate() == 0
    rows = [row for row in metrics(folder) if "engines/received_at_once" in row]
    assert (
        len(rows) == ppo_runs.STEPS and rows[2]["engines/received_at_once"] > 0 < rows[-1]["engines/received_at_once"]
    )
    assert all(row["engines/tokens_per_second"] > 0 for row in rows)
    assert result(tmp_path) == in_process
    assert not list((folder / "engines").glob("group-*"))


@pytest.mark.more
def test_engines_of_other_hosts_get_their_weights_sent(inputs, in_process, tmp_path) -> None:
    """One engine is on this host, one on what it takes for another: with a /dev/shm of its own. That one is killed and started
    again. They speak TLS, and want a token."""
    pem, token = certificate(tmp_path, "engine"), tmp_path / "token"
    token.write_text("of the engines")
    token.chmod(0o600)
    folder = tmp_path / "actor" / "engines"
    critic, port = start_server(tmp_path / "critic", *ppo_runs.server_overrides(inputs))
    actor = start_actor(
        tmp_path / "actor", port, *overrides(inputs, 2), "generation.engines.launch=false", f"generation.engines.tls.ca={pem}",
        f"generation.engines.token.token_file={token}",
    )  # fmt: skip

    def engine(name: str, *settings: str, cold: list[str] | None = None) -> Process:
        words = [
            f"--config-dir={folder}", "--config-name=this_run", "server.port=0", f"server.ready_file={folder / name}.json",
            f"server.token.token_file={token}", f"server.tls.certificate={pem}", f"server.tls.key={pem.with_suffix('.key')}",
        ]  # fmt: skip
        argv = [str(ACTOR_PYTHON), str(ROOT / "servers" / "serve_engine.py"), *words, *settings]
        return Process(Program(name, argv, ready_file=folder / f"{name}.json"), tmp_path / f"{name}.log", cold=cold)

    apart = ["unshare", "--map-root-user", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$0" "$@"']
    elsewhere = partial(engine, "elsewhere", "server.max_request_bytes=4096", cold=apart)
    wait_for(folder / "this_run.yaml", actor)
    engines = [elsewhere()]
    try:
        wait_for_rollouts(actor, tmp_path / "actor", 2)
        engines[0].kill()
        engines.append(elsewhere())
        engines[1].ready(120)
        engines.append(engine("here"))
        assert actor.wait(240) == 0, actor.output()
        assert [each.terminate() for each in engines[1:]] == [0, 0]
    finally:
        actor.kill()
        for each in engines:
            each.kill()
        assert critic.terminate() == 0
    assert "engine elsewhere is lost" in actor.output()
    assert result(tmp_path) == in_process


def wait_for(path: Path, actor: Process) -> None:
    while not path.exists():
        assert actor.poll() is None, actor.output()
        time.sleep(0.01)


def wait_for_rollouts(actor: Process, folder: Path, step: int) -> None:
    wait_for(folder / "rollouts" / f"step_{step:06d}.parquet", actor)


def kill_engine(actor: Process, folder: Path, number: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Kill or stop an engine, once it is ready: the run begins with the first that is."""
    ready = folder / "engines" / f"engine-{number}.json"
    wait_for(ready, actor)
    os.kill(json.loads(ready.read_text())["pid"], how)
