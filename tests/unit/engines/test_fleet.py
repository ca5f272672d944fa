"""A fleet deals out devices, and waits for no call to an engine that it gave up. tests/integration has real engines."""

import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from nemo_style_rlhf.engines import fleet as fleet_module
from nemo_style_rlhf.engines.client import EngineClient, EngineProcess
from nemo_style_rlhf.engines.fleet import CallAbandoned, Fleet
from nemo_style_rlhf.engines.pool import EnginePool
from nemo_style_rlhf.engines.programs import devices_beside
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.generation.interface import ProbeTarget
from nemo_style_rlhf.generation.weight_store import PublishedWeights
from nemo_style_rlhf.launch.program import Program
from nemo_style_rlhf.launch.supervisor import Supervisor
from nemo_style_rlhf.schema.generation import EnginesConfig
from nemo_style_rlhf.wire.connection import ServerUnreachable


def test_engines_get_the_devices_that_the_ranks_leave() -> None:
    assert devices_beside(2, ["0", "1", "2", "3"], 2, 1) == ["2", "3"]
    assert devices_beside(1, ["4", "5", "GPU-a", "GPU-b", "7"], 2, 2) == ["5,GPU-a", "GPU-b,7"]


def test_too_few_devices_are_one_sentence() -> None:
    with pytest.raises(UserError, match=r"count=2 with 2 GPUs each beside 1 ranks needs 5 GPUs, this host shows 4: "):
        devices_beside(1, ["0", "1", "2", "3"], 2, 2)


def test_nobody_waits_for_a_call_to_an_engine_that_is_given_up() -> None:
    engine, answers = engine_process(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.call, answers.wait)
        assert not call.done()
        engine.give_up("it hangs")
        engine.give_up("it was killed")  # the first reason counts
        with pytest.raises(ServerUnreachable, match="it hangs"):
            call.result(10)
    answers.set()


def test_answers_and_errors_of_calls_arrive() -> None:
    engine = engine_process()
    assert engine.call(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda: 1 // 0)


def test_nobody_waits_for_an_engine_of_a_pool_that_is_closed(tmp_path: Path) -> None:
    pool = EnginePool(Fleet(EnginesConfig(count=1, launch=False), tmp_path), weight_shapes={}, calls=1)
    weights = PublishedWeights(3, "digest", ProbeTarget((), (), 1.0), (), Path("weights"))
    with ThreadPoolExecutor(1) as trainer:
        calls = [trainer.submit(pool.load, weights), pool.ask([], 3)]
        time.sleep(0.2)
        pool.close()
        for call in calls:
            with pytest.raises(CallAbandoned):
                call.result(10)


@pytest.mark.parametrize("known", ["_engines", "_joining"])
def test_a_fleet_that_is_closed_has_no_call_under_way(tmp_path: Path, known: str) -> None:
    """Or the process could not end before generation.engines.request_timeout_s is over."""
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        client = EngineClient("127.0.0.1", silent.getsockname()[1], token=None, retries=1, timeout_s=60)
        client._connection.boot_id = "b007"
        engine = EngineProcess("engine-0", client, {})
        fleet = Fleet(EnginesConfig(count=1, launch=False), tmp_path)
        getattr(fleet, known)[engine.name] = engine
        call = pool.submit(engine.call, lambda: client.acquire("lease", {}))
        with silent.accept()[0] as link:
            assert link.recv(1)
            closed = time.monotonic()
            fleet.close()
            with pytest.raises(ServerUnreachable):
                call.result(10)
            engine._threads.shutdown()
            assert time.monotonic() - closed < 5


class Gated(Supervisor):
    """Begins what the test waits for, and goes on once the test lets it."""

    def __init__(self, log_dir: Path, restarts: int, **wording: str) -> None:
        super().__init__(log_dir, restarts, **wording)
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def restart(self, name: str, program: Program | None = None) -> None:
        self._gate()
        super().restart(name, program)

    def stop_all(self, grace_s: float) -> None:
        self._gate()
        super().stop_all(grace_s)

    def _gate(self) -> None:
        self.begun.set()
        assert self.goes_on.wait(20)


@pytest.mark.parametrize("first", ["restart", "close"])
def test_an_engine_that_is_lost_while_the_fleet_closes_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    def sleeper(name: str, *_: object) -> Program:
        return Program(name, [sys.executable, "-S", "-c", "import time; time.sleep(600)"], ready_file=tmp_path / name)

    before = {each.pid for each in psutil.Process().children()}
    monkeypatch.setattr(fleet_module, "engine_program", sleeper)
    made: list[Gated] = []
    monkeypatch.setattr(
        fleet_module, "Supervisor", lambda *given, **named: made.append(Gated(*given, **named)) or made[0]
    )
    fleet, engine = Fleet(EnginesConfig(count=1), tmp_path), engine_process()
    fleet.start()
    (supervisor,) = made
    fleet._engines["engine-0"] = engine
    acts = {"restart": lambda: fleet.lost(engine, "it was killed"), "close": fleet.close}
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(acts.pop(first))]
        assert supervisor.begun.wait(20)
        calls += [pool.submit(act) for act in acts.values()]
        time.sleep(0.2)
        supervisor.goes_on.set()
        for call in calls:
            call.result(20)
    assert {each.pid for each in psutil.Process().children()} <= before
    with pytest.raises(CallAbandoned):
        fleet.engine()


@pytest.mark.parametrize(("bits", "started_for_bits"), [(True, True), (True, False), (False, False)])
def test_an_engine_that_loses_bits_is_refused_where_they_were_asked_for_and_else_told_of(
    bits: bool,
    started_for_bits: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet, engine = Fleet(EnginesConfig(count=1, launch=False), tmp_path, bits=bits), engine_process()
    monkeypatch.setattr(engine.client, "acquire", lambda *_: None)
    monkeypatch.setattr(engine.client, "load", lambda *_: (0.0, "being preempted"))
    monkeypatch.setattr(engine.client, "status", lambda: SimpleNamespace(repeatable=started_for_bits))
    weights = PublishedWeights(3, "digest", ProbeTarget((), (), 1.0), (), Path("weights"))
    if bits:
        lost = "on engine-0 the bits .* depend on being preempted"
        sentence = lost if started_for_bits else "engine engine-0 was started without it"
        with pytest.raises(UserError, match=rf"run\.deterministic=true, but {sentence}"):
            fleet._load(engine, "lease", weights)
        return
    for _ in range(2):
        assert fleet._load(engine, "lease", weights) is None
    assert caplog.text.count("samples depend, by rounding, on being preempted") == 1


def engine_process() -> EngineProcess:
    return EngineProcess("engine-0", EngineClient("127.0.0.1", 1, token=None, retries=0, timeout_s=1), {})
