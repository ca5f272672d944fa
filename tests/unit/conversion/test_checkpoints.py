"""The converter refuses anything but a checkpoint in one sentence, which names what to give."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_style_rlhf.checkpoint.store import CheckpointStore
from nemo_style_rlhf.conversion.checkpoints import export_checkpoint
from nemo_style_rlhf.critic_service.store import START_WEIGHTS
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.digests import module_digest
from nemo_style_rlhf.models.scalar_loading import starting_critic
from nemo_style_rlhf.schema.common import ModelConfig
from nemo_style_rlhf.schema.critic import PPOCriticConfig
from tests.support.models import save_reward_model
from tests.support.paths import ROOT


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with a whole actor checkpoint, as far as its files go, and one of a critic."""
    (tmp_path / "actor" / "checkpoints" / "step_000001").mkdir(parents=True)
    run = tmp_path / "run"
    store = CheckpointStore(run / "checkpoints", keep_last=2)
    (store.begin(3) / "identity.json").write_text("{}")
    store.commit(3, "run", critic={}, state={}, versions={})
    store.begin(4)
    critic = run / "checkpoints" / "run-step_000003" / "critic"
    critic.mkdir(parents=True)
    (critic / "critic.json").write_text(json.dumps({"critic_step": 3, "digests": {"state": "0"}}))
    (run / "config.yaml").write_text("model: {path: /nowhere/policy}\n")
    (run / "checkpoints" / "step_00000007.ckpt").write_text("nothing that torch has written")
    return run


CASES = {
    "no such path": ("nowhere", r"there is no .*/nowhere: give a PPO run's checkpoints/step_000050, a critic"),
    "the run's folder": ("", r"run is no checkpoint: give one of its checkpoints, such as .*/checkpoints/\S*step_"),
    "the folder of both halves of a run": ("..", r"is no checkpoint: give one of its checkpoints, such as .*/actor/"),
    "an actor's folder beside a critic's": (
        "../actor",
        r"actor is no checkpoint: give one of its checkpoints, such as",
    ),
    "a file in a checkpoint": ("checkpoints/step_000003/manifest.json", r"manifest.json is no checkpoint: give a PPO"),
    "all checkpoints": ("checkpoints", r"checkpoints is no checkpoint: give a PPO run's"),
    "an unfinished one": ("checkpoints/step_000004", r"step_000004 is not complete \(manifest.json\): give another"),
    "a damaged critic": ("checkpoints/run-step_000003", r"critic is damaged \(state\): give another checkpoint of the"),
    "a damaged critic's part": ("checkpoints/run-step_000003/critic", r"critic is damaged \(state\)"),
    "a damaged stage": ("checkpoints/step_00000007.ckpt", r"step_00000007.ckpt is damaged, or holds something else"),
    "a start that is gone": ("checkpoints/step_000003", r"/nowhere/policy"),
}


@pytest.mark.parametrize("kind", CASES)
def test_it_is_named(run: Path, tmp_path: Path, kind: str) -> None:
    where, sentence = CASES[kind]
    if "stage" in kind or "gone" in kind:
        (run / "config.yaml").write_text(
            "model: {path: /nowhere/policy}\nrun: {output_dir: x}\ndata: {train_path: x}\n"
        )
    with pytest.raises(UserError, match=sentence):
        export_checkpoint(run / where, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("content", [None, "", "- a\n", "model: 3\n", "{", "\udcff"])
def test_a_configuration_that_is_none_is_named(run: Path, tmp_path: Path, content: str | None) -> None:
    (run / "config.yaml").unlink()
    if content is not None:
        (run / "config.yaml").write_text(content, errors="surrogateescape")
    with pytest.raises(UserError, match=r"config\.yaml (cannot be read|is no configuration).*in its run's folder"):
        export_checkpoint(run / "checkpoints" / "step_000003", tmp_path / "model")


ACTOR = "model: {path: /nowhere/policy, lora: {rank: 2}}\nrun: {output_dir: x}\ndata: {train_path: x}\n"


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_named(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "config.yaml").write_text(ACTOR)
    examined = CheckpointStore.examined

    def then_deleted(store: CheckpointStore, step: int) -> object:
        result = examined(store, step)
        shutil.rmtree(run / "checkpoints" / "step_000003")
        return result

    monkeypatch.setattr(CheckpointStore, "examined", then_deleted)
    with pytest.raises(UserError, match=r"step_000003 was deleted while it was read, .*: give a newer one$"):
        export_checkpoint(run / "checkpoints" / "step_000003", tmp_path / "model")


def test_adapters_of_a_critic_belong_to_the_model_it_started_from(tmp_path: Path) -> None:
    """``--model`` names that model also where it is not the reward model."""
    critic = tmp_path / "run" / "checkpoints" / "run-step_000003" / "critic"
    critic.mkdir(parents=True)
    start, other = (str(save_reward_model(tmp_path / name, seed=seed)) for name, seed in (("start", 0), ("other", 1)))
    (tmp_path / "run" / "config.yaml").write_text(
        f"model: {{path: /nowhere/reward, dtype: float32, lora: {{rank: 2}}}}\nvalue_model: {{path: {other}}}\n"
        "run: {output_dir: x}\n"
    )
    config = PPOCriticConfig(model=ModelConfig(path=start, dtype="float32"))
    content = {"critic_step": 3, "digests": {}, "critic": {START_WEIGHTS: module_digest(starting_critic(config))}}
    (critic / "critic.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"critic has adapters of a model with .*/other has .* as --model$"):
        export_checkpoint(critic, tmp_path / "model")
    with pytest.raises(UserError, match="critic was deleted while it was read"):  # past that check
        export_checkpoint(critic, tmp_path / "model", model=start)


@pytest.mark.parametrize("kind", ["a folder", "a file"])
def test_nothing_is_written_over(run: Path, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "model"
    inside = target if kind == "a file" else target / "thesis.tex"
    inside.parent.mkdir(exist_ok=True)
    inside.write_text("years of work")
    with pytest.raises(UserError, match="model exists: give a new folder"):
        export_checkpoint(run / "checkpoints" / "step_000003", target)
    assert inside.read_text() == "years of work"


def test_no_adapter_is_written_over(run: Path, tmp_path: Path) -> None:
    (run / "config.yaml").write_text(ACTOR)
    (tmp_path / "model_adapter").mkdir()
    (tmp_path / "model_adapter" / "thesis.tex").touch()
    with pytest.raises(UserError, match="model_adapter exists: give a new folder"):
        export_checkpoint(run / "checkpoints" / "step_000003", tmp_path / "model")


@pytest.mark.slow("starts a program")
def test_the_command_line_says_it_in_one_line(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "trainers/export_checkpoint.py", str(run), str(tmp_path / "model")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {run} is no checkpoint")


def test_a_critic_whose_keys_have_new_names_is_left_to_its_version(run: Path, tmp_path: Path) -> None:
    (run / "config.yaml").write_text("model: {path: /nowhere/reward}\ncritic: {enabled: true}\n")
    with pytest.raises(UserError, match=r"was recorded by an earlier version, .* export with that version"):
        export_checkpoint(run / "checkpoints" / "run-step_000003" / "critic", tmp_path / "model")
