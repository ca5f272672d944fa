"""The examples' runner: whatever signal ends it, nothing that it started outlives it."""

import signal
import subprocess
import sys

import psutil
import pytest

from tests.support.paths import ROOT
from tests.support.processes import soon

EXAMPLES = ROOT / "examples"


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGHUP, 130), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_a_killed_runner_leaves_no_stage_behind(tmp_path, number, code):
    note = tmp_path / "pid"
    runner = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
from pathlib import Path
from pipeline import run_example
from nemo_style_rlhf.launch.program import Program
sleeper = Program("sleeper", [sys.executable, "-c", "import os, pathlib, time; "
                  "pathlib.Path({str(note)!r}).write_text(str(os.getpid())); time.sleep(600)"])
run_example(lambda stages: stages.run(sleeper), Path({str(tmp_path / "outputs")!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", runner], stdout=subprocess.PIPE, text=True)
    assert soon(lambda: note.exists() and note.read_text())
    process.send_signal(number)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == code
    assert said == ("" if number == signal.SIGKILL else "interrupted: every process was stopped\n")
    assert soon(lambda: gone(int(note.read_text())))


def test_a_failed_stage_is_named_with_its_log(tmp_path):
    runner = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
from pathlib import Path
from pipeline import run_example
from nemo_style_rlhf.launch.program import Program
broken = Program("broken", [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"])
run_example(lambda stages: stages.run(broken), Path({str(tmp_path / "outputs")!r}))
"""
    done = subprocess.run([sys.executable, "-c", runner], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout.startswith("failed: broken ended with exit code 3")
    assert done.stdout.endswith("the reason\n")
