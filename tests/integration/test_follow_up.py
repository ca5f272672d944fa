"""The command that a run prints behind `next:` is what a user pastes: a shell runs it as it stands."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.models import save_policy, save_reward_model
from tests.support.paths import ROOT
from tests.support.supervised_runs import train

REWARD = "def reward_func(queries, prompts, labels):\n    return [float(len(query)) for query in queries]\n"
PPO = [
    "data=hh", "data.prompt_template='Question:\n{prompt}'", "model=fp32", "generation=hf", "generation.max_length=8",
    "algorithm.max_steps=1", "algorithm.num_rollout_samples=16", "algorithm.mini_batches=1", "reward.function.weight=0.5",
    "critic.model.dtype=float32", "run.num_threads=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, Anthropic-HH pairs and a reward function in a folder whose name has a blank and a quote."""
    folder = tmp_path_factory.mktemp("follow up") / "anna's runs"
    folder.mkdir()
    save_policy(folder / "policy")
    save_reward_model(folder / "reward")
    (folder / "reward.py").write_text(REWARD)
    for name, first in (("train", 0), ("val", 20)):
        asked = [f"\n\nHuman: w{first + i} w{i}\n\nAssistant:" for i in range(16)]
        rows = [{"chosen": f"{question} w{i} w5", "rejected": f"{question} w6"} for i, question in enumerate(asked)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def overrides(inputs: Path, run: str) -> list[str]:
    paths = {
        "run.output_dir": run,
        "model.path": "policy",
        "data.train_path": "train.jsonl",
        "data.val_path": "val.jsonl",
    }
    return [f"{key}={quoted(inputs / name)}" for key, name in paths.items()]


def quoted(path: Path) -> str:
    """``path`` in the quotes that Hydra wants."""
    return "'{}'".format(str(path).replace("'", r"\'"))


def pasted(output: str, *more: str) -> str:
    """Run the printed command in a shell; what it printed."""
    (command,) = re.findall(r"next: (.*)", output)
    done = subprocess.run(
        ["bash", "-c", " ".join([command, *more])], cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, command + done.stdout + done.stderr
    return done.stdout + done.stderr


def evaluated(folder: Path) -> tuple[object, list[str], int, int]:
    """Source of the prompts, rewards, number of checkpoints, and samples of each."""
    summary = json.loads((folder / "evaluation" / "summary.json").read_text())
    return summary["prompts"], summary["rewards"], len(summary["checkpoints"]), summary["checkpoints"][0]["samples"]


def test_what_follows_ppo_compares_on_its_held_out_prompts_by_its_rewards(inputs: Path) -> None:
    words = [*overrides(inputs, "ppo"), *PPO, f"critic.model.path={quoted(inputs / 'reward')}"]
    words.append(f"reward.function.path={quoted(inputs / 'reward.py')}")
    run = warm.run(["trainers/train_ppo_local.py", *words], timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    pasted(run.stderr)
    sources = [str(inputs / "reward"), str(inputs / "reward.py")]
    assert evaluated(inputs / "ppo") == (str(inputs / "val.jsonl"), sources, 2, 16)
    actor = (inputs / "ppo" / "actor.log").read_text()
    assert re.search(r"next: .*evaluate.py .* data=hh ", actor)


def test_what_follows_dpo_compares_on_its_held_out_prompts(inputs: Path) -> None:
    run = train("train_dpo", *overrides(inputs, "dpo"), "model.dtype=float32", "trainer.max_steps=1")
    assert run.returncode == 0, run.stderr
    pasted(run.stderr)
    assert evaluated(inputs / "dpo") == (str(inputs / "val.jsonl"), [], 2, 16)


@pytest.mark.more
def test_what_follows_a_reward_model_is_ppo_on_the_prompts_of_its_pairs(inputs: Path) -> None:
    run = train("train_reward_model", *overrides(inputs, "rm"), "trainer.max_steps=1")
    assert run.returncode == 0, run.stderr
    assert "dry run: every phase ran once" in pasted(run.stderr, "--dry-run")
