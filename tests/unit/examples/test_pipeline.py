"""The examples' runner: a failed stage is shown, and nothing it started outlives it."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"
spec = importlib.util.spec_from_file_location("examples_pipeline", EXAMPLES / "pipeline.py")
pipeline = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pipeline)

FAMILY = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def signals():
    """A pipeline turns SIGTERM and SIGHUP into KeyboardInterrupt; give them back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"


def soon(condition, timeout_s=20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_stage_that_ends_well_returns_its_seconds(tmp_path):
    with pipeline.Pipeline(tmp_path) as stages:
        assert stages.run("hello", [sys.executable, "-c", "print('hello')"]) > 0
    assert (tmp_path / "hello.log").read_text() == "hello\n"


def test_a_failed_stage_shows_the_end_of_its_log(tmp_path):
    with (
        pipeline.Pipeline(tmp_path) as stages,
        pytest.raises(pipeline.StageFailed, match=r"exit code 3(.|\n)*the reason"),
    ):
        stages.run("broken", [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"])


def test_a_server_that_dies_ends_the_stage_that_uses_it(tmp_path):
    with pipeline.Pipeline(tmp_path) as stages:
        stages.start("server", [sys.executable, "-c", "import time; time.sleep(0.5); raise SystemExit(1)"])
        with pytest.raises(pipeline.StageFailed, match="server ended with exit code 1"):
            stages.run("client", [sys.executable, "-c", "import time; time.sleep(600)"])


def test_leaving_ends_children_and_grandchildren(tmp_path):
    note = tmp_path / "pid"
    with pipeline.Pipeline(tmp_path) as stages:
        process = stages.start("family", [sys.executable, "-c", FAMILY, str(note)])
        assert soon(lambda: note.exists() and note.read_text())
    assert process.poll() is not None
    assert soon(lambda: not alive(int(note.read_text())))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_runner_leaves_no_stage_behind(tmp_path, number):
    note = tmp_path / "pid"
    runner = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background would hand down that it is ignored
sys.path.insert(0, {str(EXAMPLES)!r})
from pathlib import Path
from pipeline import Pipeline
with Pipeline(Path({str(tmp_path)!r})) as stages:
    stages.run("sleeper", [sys.executable, "-c", "import os, pathlib, time; "
               "pathlib.Path({str(note)!r}).write_text(str(os.getpid())); time.sleep(600)"])
"""
    process = subprocess.Popen([sys.executable, "-c", runner], stderr=subprocess.DEVNULL)
    assert soon(lambda: note.exists() and note.read_text())
    process.send_signal(number)
    assert process.wait(30) != 0
    assert soon(lambda: not alive(int(note.read_text())))
