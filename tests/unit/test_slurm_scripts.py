"""What slurm/ppo_hetjob.sh refuses before it asks Slurm for anything; the rest is tests/cluster."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT

JOB = {"SLURM_JOB_ID_HET_GROUP_1": "2", "SLURM_JOB_NAME": "ppo", "SLURM_JOB_ID": "1", "PROJECT_DIR": str(ROOT)}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"ACTOR_ARGS": ""}, "ACTOR_ARGS is empty"),
        ({"ACTOR_ARGS": "data.prompt_template=It's_{prompt} algorithm.max_steps=9"}, "ACTOR_ARGS cannot be split into words"),
        ({"CRITIC_ARGS": 'model.path="/m'}, "CRITIC_ARGS cannot be split into words"),
        ({"CRITIC_ARGS": "model.path='/m\n/n'"}, "CRITIC_ARGS cannot be split into words"),
        ({"SLURM_JOB_ID_HET_GROUP_1": ""}, "no heterogeneous Slurm job"),
    ],
)  # fmt: skip
def test_it_refuses(arguments: dict[str, str], sentence: str, tmp_path: Path) -> None:
    given = {"CRITIC_ARGS": "model.path=/m", "ACTOR_ARGS": "model.path=/m", "OUTPUT_DIR": str(tmp_path), **JOB}
    done = subprocess.run(
        ["bash", ROOT / "slurm" / "ppo_hetjob.sh"], env={**os.environ, **given, **arguments}, capture_output=True, text=True
    )  # fmt: skip
    assert done.returncode == 2 and sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1
