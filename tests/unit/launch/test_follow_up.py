"""Commands that a shell and Hydra read back as what they were made of; tests/integration/test_follow_up.py runs them."""

import dataclasses
import subprocess

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from nemo_style_rlhf.launch.composition import compose
from nemo_style_rlhf.launch.follow_up import after_ppo, command_line
from nemo_style_rlhf.schema.base import build
from nemo_style_rlhf.schema.data import MixedSourceConfig, PromptDataConfig, PromptRowsConfig
from nemo_style_rlhf.schema.evaluation import EvaluationConfig
from nemo_style_rlhf.schema.local import PPOLocalConfig

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
VALUES = TEXTS | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False, allow_infinity=False)


@given(st.dictionaries(st.sampled_from(["a.b", "c"]), VALUES | st.lists(VALUES)))
@example({"c": "a\\"})
@example({"c": "it's \\' \\\\' ${x} {y}\n\\n"})
@example({"c": ["before:outputs/my run/export", "after:a,b"]})
@example({"c": "007 \\${x} $x {{ a }}"})
@example({"c": "007"})
@example({"c": "1e3"})
def test_a_setting_survives_shell_and_hydra(settings: dict[str, object]) -> None:
    line = command_line("trainers/evaluate.py", settings)
    assert "\n" not in line
    spoken = subprocess.run(
        ["bash", "-c", f"for word in {line}; do printf '%s\\0' \"$word\"; done"], capture_output=True, check=True
    ).stdout.decode()
    _, script, *words = spoken.removesuffix("\0").split("\0")
    assert script.endswith("trainers/evaluate.py")
    read = {}
    for override in OverridesParser.create().parse_overrides(words):
        read[override.key_or_group] = override.value()
    assert OmegaConf.to_container(OmegaConf.create(read), resolve=True) == settings


def composed(line: str) -> EvaluationConfig:
    """What the program makes of the printed command."""
    words = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True).stdout.decode()
    _, script, *overrides = words.removesuffix("\0").split("\0")
    assert script == "trainers/evaluate.py"
    return build(EvaluationConfig, compose("evaluate", overrides))


def ppo(**data: object) -> PPOLocalConfig:
    config = PPOLocalConfig(data=PromptDataConfig(**{"train_path": "train.jsonl", **data}))
    config.run.output_dir, config.model.path, config.critic.model.path = "outputs/ppo", "owner/policy", "owner/reward"
    return config


@pytest.mark.parametrize(
    "data",
    [
        {"format": "hh", "val_path": ["a b.jsonl", "c,d.jsonl"], "prompt_template": "Q: {prompt}\nIt's A: "},
        {"format": "messages", "prompt_key": "turns", "system_key": "system", "today": "2026-11-27"},
        {"label_key": "answer", "sampling_key": "s", "max_prompt_length": 99, "apply_chat_template": True},
        {"mixture": [MixedSourceConfig("a"), MixedSourceConfig(["b", "c"])], "train_path": None},
    ],
    ids=str,
)  # fmt: skip
def test_the_comparison_reads_prompts_as_the_run_did(data: dict[str, object]) -> None:
    config = ppo(**data)
    found = composed(after_ppo(config)).data
    for field in dataclasses.fields(PromptRowsConfig):
        assert getattr(found, field.name) == getattr(config.data, field.name), field.name
    trained = ["a", "b", "c"] if "mixture" in data else "train.jsonl"
    assert found.path == (config.data.val_path or trained)
    assert (found.max_prompts > 0) == (config.data.val_path is None)


def test_the_comparison_samples_and_rewards_as_the_run_did() -> None:
    config = ppo()
    config.generation.temperature, config.generation.stop, config.generation.top_p = 0.7, ["\n\n", "Human:"], 0.9
    config.reward.function.path, config.reward.function.weight, config.reward.function.per_sample = "r.py", 0.5, True
    config.critic.reward_model.label_weights, config.critic.reward_model.append_eos = [1.0, 0.0], False
    found = composed(after_ppo(config))
    assert found.checkpoints == ["before:owner/policy", "after:outputs/ppo/actor/export"]
    assert (found.generation.temperature, found.generation.stop, found.generation.top_p) == (
        0.7,
        ["\n\n", "Human:"],
        0.9,
    )
    assert (found.reward.function.path, found.reward.function.weight, found.reward.function.per_sample) == (
        "r.py",
        0.5,
        True,
    )
    assert (found.reward.model.path, found.reward.model.append_eos) == ("owner/reward", False)
    assert found.reward.model.label_weights == [1.0, 0.0]


def test_a_chat_template_is_read_from_the_export() -> None:
    assert "data.chat_template=outputs/ppo/actor/export/chat_template.jinja" in after_ppo(
        ppo(format="messages", chat_template="{{ messages }}")
    )
