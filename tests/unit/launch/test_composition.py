"""Recipes of a user's own, and presets of the critic server's section."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from nemo_style_rlhf.launch.composition import compose
from tests.support.paths import ROOT

RECIPE = """# @package _global_
defaults:
  - override /engine: zero2
critic: {model: {path: my_rm}, engine: {zero_stage: 2, optim: {lr: 5e-6}}, server: {max_request_bytes: 1000000}}
"""
PLACED = RECIPE.replace("defaults:\n", "defaults:\n  - override /placement: colocated\n")


def started(script: str, folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, ROOT / "trainers" / f"{script}.py", f"--config-dir={folder}", *words]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.slow("starts a program")
@pytest.mark.parametrize(
    ("script", "recipe"), [("train_ppo_local", RECIPE), ("train_ppo_ray", PLACED), ("plan", RECIPE)]
)
def test_a_recipe_comes_after_every_preset_of_both_halves(tmp_path: Path, script: str, recipe: str) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(recipe)
    done = started(script, tmp_path, "experiment=mine", "--cfg", "job")
    composed = yaml.safe_load(done.stdout)
    critic = composed["critic"]
    assert critic["model"]["path"] == "my_rm" and composed["engine"]["zero_stage"] == 2
    assert (critic["engine"]["zero_stage"], float(critic["engine"]["optim"]["lr"])) == (2, 5e-6)
    assert critic["server"]["max_request_bytes"] == 1000000
    assert script != "train_ppo_ray" or composed["ray"]["placement"] == "colocated"


@pytest.mark.slow("starts a program")
def test_an_old_name_in_a_file_is_refused_with_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_local, _self_]\ncritic: {critic: {path: other}}\n")
    done = started("train_ppo_local", tmp_path, "--config-name=mine")
    assert done.returncode == 2 and "critic.value_model.path" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_section_takes_a_preset_or_values() -> None:
    assert compose("ppo_local", ["critic.engine=zero3"]).critic.engine.zero_stage == 3
    assert compose("plan", ["critic.engine={zero_stage:3}"]).critic.engine.zero_stage == 3
    assert compose("ppo_local").critic.engine.optim.lr == compose("ppo_critic").engine.optim.lr == 9e-6
