"""Several runs by one command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_style_rlhf import programs
from nemo_style_rlhf.launch.sweep import own_folders
from tests.support.paths import ROOT, SERVER_PYTHON

pytestmark = pytest.mark.slow("each starts a program and its runs")

PROGRAM = """
import json, os, sys
from pathlib import Path
from nemo_style_rlhf.launch.entry import entry_point
from nemo_style_rlhf.schema.supervised import SFTConfig

@entry_point(SFTConfig)
def main(config):
    folder = Path(config.run.output_dir)
    folder.mkdir(parents=True)
    (folder / "seen.json").write_text(json.dumps([config.engine.optim.lr, config.run.seed, config.run.dry_run]))
    raise SystemExit(3 if config.run.seed == 99 else 0)

main()
"""
GIVEN = ["model.path=owner/policy", "data.train_path=owner/rows", "run.output_dir=sweep"]


def sweep(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", *GIVEN, *words]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", **environment}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def seen(folder: Path) -> dict[str, list[object]]:
    return {
        str(path.parent.relative_to(folder)): json.loads(path.read_text()) for path in folder.glob("sweep/**/seen.json")
    }


def test_each_run_has_a_folder_of_its_own_and_nothing_else_is_written(tmp_path):
    done = sweep(tmp_path, "-m", "engine.optim.lr=1e-3,1e-4", "run.seed=range(1,3)", "--dry-run")
    assert done.returncode == 0, done.stderr
    found = seen(tmp_path)
    assert sorted(found.values()) == [[lr, seed, True] for lr in (1e-4, 1e-3) for seed in (1, 2)]
    assert found["sweep/engine.optim.lr_0.001_run.seed_1"] == [1e-3, 1, True]
    assert {path.name for path in tmp_path.iterdir()} == {"program.py", "sweep"}
    assert len(done.stderr.splitlines()) == 5 and done.stderr.splitlines()[-1].startswith(
        "done: 4 runs, in sweep/engine"
    )


def test_a_run_that_fails_ends_the_sweep(tmp_path):
    done = sweep(tmp_path, "--multirun", "run.seed=99,1")
    assert done.returncode == 3 and list(seen(tmp_path)) == ["sweep/run.seed_99"]
    assert done.stderr.splitlines()[-1] == "run 1 of 2 ended with exit code 3, later ones were not started"


def test_folders_that_the_user_varies_stay():
    assert own_folders([["run.output_dir=a", "x=1"], ["run.output_dir=b", "x=1"]], ["a", "b"]) == ["a", "b"]
    long = [[f"x={'y' * 200}{number}"] for number in range(2)]
    assert own_folders(long, ["a", "a"]) == ["a/1", "a/2"]


def test_the_folder_may_have_any_name(tmp_path):
    done = sweep(tmp_path, "-m", "run.seed=1,2", """run.output_dir='sweep/it\\'s [a=b], é'""")
    assert done.returncode == 0 and len(seen(tmp_path)) == 2, done.stderr


def test_ranks_of_torchrun_do_not_sweep(tmp_path):
    done = sweep(tmp_path, "-m", "run.seed=1,2", RANK="0")
    assert done.returncode == 2 and done.stderr.startswith("error: -m starts one process per run")


def test_the_folder_may_stand_in_a_file(tmp_path):
    lines = ["defaults: [sft, _self_]", "run:", "  output_dir: sweep", "model:", "  path: owner/policy", "data:"]
    (tmp_path / "mine.yaml").write_text("\n".join([*lines, "  train_path: owner/rows"]) + "\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["--config-dir=.", "--config-name=mine", "-m", "run.seed=1,2"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "program.py", *words], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 0 and sorted(seen(tmp_path)) == ["sweep/run.seed_1", "sweep/run.seed_2"], done.stderr


@pytest.mark.parametrize(
    ("python", "script", "given", "reason"),
    [
        (SERVER_PYTHON, "servers/serve_ppo_critic.py", ["model.path=owner/reward"], programs.SERVER),
        (sys.executable, "trainers/train_ppo_actor.py", ["model.path=o/p", "data.train_path=o/rows"], programs.ONE_RUN),
    ],
)
def test_programs_without_a_run_for_each_refuse(python, script, given, reason, tmp_path):
    command = [python, ROOT / script, "-m", "run.seed=1,2", f"run.output_dir={tmp_path}", *given]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, f"error: -m starts one run after the other {reason}\n")
