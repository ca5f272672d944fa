"""Which checkpoint a run resumes from, and which changes of its settings that refuses."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_style_rlhf.checkpoint.store import CheckpointStore
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.ppo.saving import IDENTITY_FILE
from nemo_style_rlhf.ppo.start import find_checkpoint, run_identity
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.base import build


def configuration(folder: Path, *overrides: str) -> PPOActorConfig:
    given = [f"run.output_dir={folder}", "run.resume=must", "model.path=x", "data.train_path=x", *overrides]
    return build(PPOActorConfig, OmegaConf.from_dotlist(given))


def test_a_run_that_must_resume_is_tried_where_it_can(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    with pytest.raises(UserError, match=r"run\.resume=must but .* holds no checkpoint"):
        find_checkpoint(config)
    store = CheckpointStore(tmp_path / "checkpoints", 2)
    actor = store.begin(3)
    (actor / IDENTITY_FILE).write_text(json.dumps(run_identity(config)))
    store.commit(3, "run", critic={"critic_step": 3}, state={}, versions={})
    manifest, saved = find_checkpoint(config)
    assert manifest is not None and manifest.step == 3 and saved == run_identity(config)
    for change, said in (
        ("run.seed=7", r"is of a run with run\.seed 1234, this one has 7"),
        ("data.shuffle=false", r"with data\.shuffle True, this one has False"),
        ("model.path=y", r"with the model in model\.path x, this one has y"),
        ("run.resume=never", "but .* holds checkpoints"),
    ):
        with pytest.raises(UserError, match=said):
            find_checkpoint(configuration(tmp_path, change))
    for change in (
        "engine.optim.lr=1",
        "algorithm.max_steps=9",
        "algorithm.samples_per_prompt=2",
        "engine.zero_stage=2",
    ):
        assert find_checkpoint(configuration(tmp_path, change))[0] == manifest


def test_batches_that_are_sampled_ahead_keep_their_number_of_samples_per_prompt(tmp_path: Path) -> None:
    """A step that was sampled with another number would mix the samples of different prompts in its groups."""
    ahead = ("algorithm.staleness=1", "generation.engines.count=1", "algorithm.correction.kind=tis")
    config = configuration(tmp_path, *ahead, "algorithm.samples_per_prompt=2")
    store = CheckpointStore(tmp_path / "checkpoints", 2)
    (store.begin(3) / IDENTITY_FILE).write_text(json.dumps(run_identity(config)))
    store.commit(3, "run", critic={"critic_step": 3}, state={}, versions={})
    assert find_checkpoint(config)[0] is not None
    with pytest.raises(UserError, match=r"with algorithm\.samples_per_prompt 2, this one has 4: resume it as it was"):
        find_checkpoint(configuration(tmp_path, *ahead, "algorithm.samples_per_prompt=4"))


NULL, SAME, OTHER = "model.reference_path=null", "model.reference_path=x", "model.reference_path=y"
NO_KL = "algorithm.initial_policy_kl_penalty=0"


@pytest.mark.parametrize(
    ("was", "resumed", "refused"),
    [
        (
            OTHER,
            [NULL, SAME, "model.reference_path=z"],
            r"with the KL reference \(model\.reference_path\) y, this one has",
        ),
        (NULL, [OTHER], r"with the KL reference \(model\.reference_path\) x, this one has y"),
    ],
)
def test_a_run_keeps_its_reference(tmp_path: Path, was: str, resumed: list[str], refused: str) -> None:
    identity = run_identity(configuration(tmp_path, was))
    store = CheckpointStore(tmp_path / "checkpoints", 2)
    (store.begin(3) / IDENTITY_FILE).write_text(json.dumps(identity))
    store.commit(3, "run", critic={"critic_step": 3}, state={}, versions={})
    for change in resumed:
        with pytest.raises(UserError, match=refused):
            find_checkpoint(configuration(tmp_path, change))
    for changes in ([was], [NULL, NO_KL]):
        assert find_checkpoint(configuration(tmp_path, *changes))[0] is not None


def test_a_run_with_a_critic_needs_its_critic_checkpoint(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    store = CheckpointStore(tmp_path / "checkpoints", 2)
    (store.begin(3) / IDENTITY_FILE).write_text("{}")
    store.commit(3, "run", critic={}, state={}, versions={})
    with pytest.raises(UserError, match="step_000003 is of a run without a critic server"):
        find_checkpoint(config)
