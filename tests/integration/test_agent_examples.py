"""The examples of agents run from end to end: few conversations and steps, which teach a model nothing."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from nemo_style_rlhf.launch.program import ACTOR_PYTHON
from tests.support.paths import ROOT

pytestmark = pytest.mark.more

SHORT = """
import sys
from dataclasses import replace
sys.path.insert(0, {folder!r})
import run

example = {example}
run.main(replace(example, conversations=640, actor=example.actor | {{"algorithm.num_rollout_samples": 16}}))
"""


@pytest.mark.parametrize(
    ("name", "example"),
    [("calculator", "run.EXAMPLE"), ("openai_program", "run.example(run.free_port())")],
)
def test_an_example_runs_to_its_end(tmp_path: Path, name: str, example: str) -> None:
    script = SHORT.format(folder=str(ROOT / "examples" / "agents" / name), example=example)
    command = [str(ACTOR_PYTHON), "-c", script, "--steps", "2", "--output-dir", str(tmp_path / "out")]
    environment = {**os.environ, "NSR_AGENT_TOKEN": "the-token-of-the-run"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert 0 <= summary["right_after"] <= 1 and summary["seconds"] > 0
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "Held-out problems" in done.stdout and "<|im_start|>assistant" in done.stdout
