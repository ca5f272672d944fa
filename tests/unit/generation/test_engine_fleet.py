"""A fleet deals out devices, and waits for no call to an engine that it gave up. tests/integration has real engines."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.generation.engine_client import EngineClient, EngineProcess
from nemo_style_rlhf.generation.engine_programs import devices_beside
from nemo_style_rlhf.transport.connection import ServerUnreachable


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


def engine_process() -> EngineProcess:
    return EngineProcess("engine-0", EngineClient("127.0.0.1", 1, token=None, retries=0, timeout_s=1), {})
