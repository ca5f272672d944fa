"""`make quickstart` does what the README says, by the numbers."""

import json
import subprocess

import pytest

from tests.integration.processes import ROOT


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """One run with a seed that is not the documented one."""
    folder = tmp_path_factory.mktemp("quickstart")
    command = [ROOT / ".venv-actor/bin/python", "examples/quickstart/run.py", "--seed", "3", "--output-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_policy_becomes_pleasant_without_collapsing(outputs):
    summary = json.loads((outputs / "summary.json").read_text())
    assert 0.35 < summary["gold_before"] < 0.65
    assert summary["gold_after"] >= 0.9
    assert summary["reward_after"] > summary["reward_before"]
    assert 0 < summary["kl_per_token"] < 0.3
    assert summary["distinct_after"] >= 0.8 * summary["distinct_before"]
    assert summary["grammatical_after"] >= 0.95


def test_it_draws_its_curves_and_leaves_no_process_behind(outputs):
    assert (outputs / "curves.png").read_bytes().startswith(b"\x89PNG")
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(outputs) not in processes
