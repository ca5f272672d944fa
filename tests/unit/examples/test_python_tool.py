"""The environment with Python in a sandbox. Its programs are honest: attacks are in tests/unit/scoring/sandbox."""

import asyncio
import time

import pytest

from nemo_style_rlhf.agents.environment import Task
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.scoring import sandbox
from tests.support.example_environments import answer, call, load, play


@pytest.fixture(scope="module")
def python_tool():
    return load("python_tool")


def test_what_a_program_prints_is_read_and_the_right_answer_earns_one(python_tool):
    read, end = play(python_tool, "15", call(code="n = [3, 5, 7]; print(sum(n))"), answer("15"))
    assert read.messages == [{"role": "tool", "content": "15"}] and not read.done
    assert end.done and end.reward == 1 and end.metrics == {"tool_calls": 1}


@pytest.mark.parametrize("code", ["print(", "1 / 0", "exit(1)", "\0", 3])
def test_a_program_that_fails_is_answered(python_tool, code):
    assert play(python_tool, "15", call(code=code))[0].messages == [{"role": "tool", "content": "error"}]


def test_only_the_beginning_of_a_long_output_is_read(python_tool):
    assert play(python_tool, "15", call(code="print('ab' * 9999)"))[0].messages[0]["content"] == "ab" * 100


@pytest.mark.slow("waits for a program")
def test_other_episodes_go_on_while_a_program_runs(python_tool, monkeypatch):
    monkeypatch.setattr(python_tool, "SECONDS", 2.0)

    async def meanwhile():
        environment, longest = python_tool.Environment(), 0.0
        await environment.reset(Task("?", label="15"))
        endless = asyncio.create_task(environment.step(call(code="while True: pass")))
        while not endless.done():
            began = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - began)
        return endless.result(), longest

    read, longest = asyncio.run(meanwhile())
    assert read.messages == [{"role": "tool", "content": "error"}]
    assert longest < 1.5


def test_a_machine_without_a_sandbox_is_told_so_when_the_file_is_imported(monkeypatch):
    sandbox.require_sandbox.cache_clear()
    monkeypatch.delenv(sandbox.WITHOUT, raising=False)
    monkeypatch.setenv("PATH", "")
    try:
        with pytest.raises(UserError, match="bwrap is not installed; install bubblewrap"):
            load("python_tool")
    finally:
        sandbox.require_sandbox.cache_clear()
