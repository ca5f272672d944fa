"""Two ranks make the same optimizer steps as one."""

import json
import subprocess
import sys

import pytest
import torch

from tests.integration.processes import ROOT


def steps(ranks, preset, zero_stage, output):
    subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m",
            "tests.integration.ranks", preset, str(zero_stage), str(output),
        ],
        cwd=ROOT, check=True, timeout=120, capture_output=True,
    )  # fmt: skip
    return json.loads(output.read_text()), torch.load(output.with_suffix(".pt"))


@pytest.mark.parametrize(("preset", "zero_stage"), [("ppo", 1), ("grpo", 2), ("dr_grpo", 1)])
def test_two_ranks_take_the_same_steps_as_one(preset, zero_stage, tmp_path):
    one_norms, one = steps(1, preset, zero_stage, tmp_path / "one.json")
    two_norms, two = steps(2, preset, zero_stage, tmp_path / "two.json")
    assert two_norms == pytest.approx(one_norms, rel=1e-6)
    assert float((one - two).norm()) <= 1e-6 * float(one.norm())
