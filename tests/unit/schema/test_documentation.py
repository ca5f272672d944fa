"""`--help KEY` explains keys, and the nearest ones are suggested for unknown ones."""

import dataclasses
import pkgutil
import runpy
import sys
from importlib import import_module

import pytest
from omegaconf import OmegaConf

import nemo_style_rlhf.launch.entry  # noqa: F401 - before a script takes the place of the main module
from nemo_style_rlhf import schema
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch.usage import describe_keys
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.base import BOUNDS, build, keys
from nemo_style_rlhf.schema.supervised import SFTConfig
from tests.support.paths import ROOT


def refusal(
    given: list[str], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, script: str = "train_sft"
) -> str:
    """Run a script in this process, which ends before it loads anything."""
    monkeypatch.setattr(sys, "argv", [f"trainers/{script}.py", *given])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
    assert ended.value.code == 2
    return capsys.readouterr().err.removeprefix("error: ").rstrip("\n")


def test_a_key_is_explained_by_its_docstring():
    assert describe_keys("train_ppo_actor", ["algorithm.ppo_epochs"]) == (
        "algorithm.ppo_epochs (int, default 1; a number above 0)\n    Passes over one rollout."
    )
    assert describe_keys("train_ppo_actor", ["model.path"]).startswith(
        "model.path (str, required)\n    A local Hugging Face directory"
    )
    assert describe_keys("train_ppo_actor", ["run.resume"]).startswith(
        "run.resume (str, default auto; one of auto, never, must)\n    auto (resume from"
    )


def test_a_group_is_explained_key_by_key():
    lines = describe_keys("train_ppo_actor", ["algorithm.shaping"]).splitlines()
    assert lines[0].startswith("algorithm.shaping: Turns raw scores into rewards")
    assert any(line.startswith("algorithm.shaping.clip_low (float | null, default null)") for line in lines)


def test_a_default_is_the_programs_own():
    assert describe_keys("train_sft", ["engine.optim.lr"]).startswith(
        "engine.optim.lr (float, default 2e-05; a number above 0)"
    )


def test_every_key_and_group_of_a_run_can_be_explained():
    every = list(keys(PPOActorConfig))
    whole = describe_keys("train_ppo_actor", sorted({key.split(".")[0] for key in every}))
    assert len(every) > 150
    told = describe_keys("train_ppo_actor", every)
    assert all(f"\n{key} (" in f"\n{told}" for key in every)
    assert "=<factory>" not in whole and "Config(" not in whole


def test_the_command_line_explains_and_refuses(capsys, monkeypatch):
    sentence = refusal(["--help", "engine.optm"], capsys, monkeypatch)
    assert sentence == "--help engine.optm: there is no such key; --help alone lists all of them"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("learning_rate", "did you mean engine.optim.lr?"),
        ("engine.learning_rate", "did you mean engine.optim.lr?"),
        ("trainer.max_step", "did you mean max_steps?"),
        ("max_steps", "did you mean trainer.max_steps?"),
    ],
)
def test_an_unknown_key_is_compared_with_those_of_all_groups(given, meant, capsys, monkeypatch):
    assert refusal([f"{given}=1"], capsys, monkeypatch).endswith(meant)


@pytest.mark.parametrize("mark", ["", "+", "++", "~"])
def test_a_renamed_key_is_refused_with_its_new_name(mark, capsys, monkeypatch):
    sentence = refusal([f"{mark}critic.critic.path=x"], capsys, monkeypatch, "train_ppo_local")
    assert sentence == "critic.critic.path: it was renamed, use critic.value_model.path"


def test_all_missing_keys_are_named_at_once():
    with pytest.raises(
        UserError, match=r"^model\.path, run\.output_dir are not set: .*, model\.path=\.\.\. run\.output_dir=\.\.\.$"
    ):
        build(SFTConfig, OmegaConf.create({}))


def test_a_key_that_is_defined_again_keeps_its_bounds():
    """inspect_data leaves some to the stage that it shows."""
    modules = [import_module(f"{schema.__name__}.{each.name}") for each in pkgutil.iter_modules(schema.__path__)]
    classes = {
        each
        for module in modules
        for each in vars(module).values()
        if isinstance(each, type) and dataclasses.is_dataclass(each)
    }

    def bounded(kind: type) -> set[str]:
        return {each.name for each in dataclasses.fields(kind) if BOUNDS in each.metadata}

    parents = [(kind, parent) for kind in classes for parent in kind.__mro__[1:] if dataclasses.is_dataclass(parent)]
    lost = {f"{kind.__name__}.{name}" for kind, parent in parents for name in bounded(parent) - bounded(kind)}
    assert lost == {f"InspectedDataConfig.{name}" for name in ("format", "learn", "max_length")}
