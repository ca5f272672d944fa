"""The commands that may follow a run, as a shell in this folder takes them. They name what the run itself was given."""

import dataclasses
import shlex
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_style_rlhf.launch.interpreter import COMMAND, ROOT
from nemo_style_rlhf.launch.overrides import quoted
from nemo_style_rlhf.launch.program import ACTOR, PYTHON
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.algorithm import AlgorithmConfig
from nemo_style_rlhf.schema.data import PromptTemplateConfig, TrainingDataConfig
from nemo_style_rlhf.schema.evaluation import EXPORT_FOLDER, EvaluationConfig
from nemo_style_rlhf.schema.generation import GenerationConfig
from nemo_style_rlhf.schema.pair import LaunchedConfig
from nemo_style_rlhf.schema.sources import names_of
from nemo_style_rlhf.schema.supervised import DPOConfig, KTOConfig, RewardModelConfig, SFTConfig

Preferences = RewardModelConfig | DPOConfig | KTOConfig


def _names(schema: type) -> set[str]:
    return {field.name for field in dataclasses.fields(schema)}


OF_MODELS = {"dtype", "attn_implementation", "trust_remote_code"}
OF_REWARD_MODELS = {"append_eos", "normalize_rewards", "label_weights"}
OF_SAMPLING = _names(GenerationConfig) - {"gpu_memory_utilization"}
FEW_PROMPTS = 256
"""Prompts of the training rows that an evaluation takes if none are held out."""


@dataclass(frozen=True)
class Prompts:
    """Describes how to read only the prompts of a stage's rows."""

    layout: tuple[str, str] | None
    """data.format and data.prompt_key; None if no setting separates prompts from answers."""
    count: int
    """Number of training rows."""
    positions: int | None
    """Tokens of the model's longest sequence; None without a limit."""

    def settings(self, config: Preferences, rows: Mapping[str, Any], key: str) -> dict[str, Any]:
        """The settings that read ``rows``; without a layout, only the user knows the prompts under data.``key``."""
        longest = min(config.data.max_length, self.positions or config.data.max_length)
        lengths = {"generation.max_length": min(GenerationConfig().max_length, longest // 2)}
        lengths["data.max_prompt_length"] = longest - lengths["generation.max_length"]
        if self.layout is None:
            return {f"data.{key}": "PROMPTS", **lengths}
        layout, column = self.layout
        read = {**_layout(layout, config.data, config.export_path), **rows, "data.prompt_key": column}
        return {**read, **lengths, **_changed("model", config.model, EvaluationConfig().model, OF_MODELS)}


def command_line(script: str, settings: Mapping[str, Any]) -> str:
    """The command that starts ``script``, such as trainers/evaluate.py, in its environment."""
    path, python = ROOT / script, PYTHON[script.partition("/")[0]]
    if not python.exists():
        python = Path(sys.executable)
    installed = python.with_name(COMMAND + path.stem.replace("_", "-"))
    program = map(_from_here, [python, path] if path.is_file() else [installed])
    return " ".join(map(_shell_word, [*program, *(f"{key}={_value(value)}" for key, value in settings.items())]))


def comparison(before: str, after: str, settings: Mapping[str, Any]) -> str:
    """The command that compares the answers of two models."""
    return command_line("trainers/evaluate.py", {"checkpoints": [f"before:{before}", f"after:{after}"], **settings})


def after_ppo(config: PPOActorConfig) -> str:
    """The comparison on a PPO run's own prompts, sampled and rewarded as there; empty for a dry run. Only a launcher knows the
    reward model of an actor's critic server."""
    if config.run.dry_run:
        return ""
    launched = isinstance(config, LaunchedConfig)
    unset, export = EvaluationConfig(), f"{config.run.output_dir}/{f'{ACTOR}/' if launched else ''}{EXPORT_FOLDER}"
    rewards: dict[str, Any] = {}
    if isinstance(config, LaunchedConfig) and config.reward.critic.weight:
        served = config.critic.reward_model
        rewards = {"reward.model.path": config.critic.model.path}
        rewards |= _changed("reward.model", served, unset.reward.model, OF_REWARD_MODELS)
        rewards |= _changed("reward.model", config.reward.critic, unset.reward.model, {"weight"})
    if config.reward.function.weight:
        rewards |= _changed("reward.function", config.reward.function, unset.reward.function)
    return comparison(
        config.model.path,
        export,
        {
            **_layout(config.data.format, config.data, export),
            **_held_out(config.data),
            **_changed("data", config.data, unset.data, {"label_key", "sampling_key", "max_prompt_length"}),
            **rewards,
            **_changed("reward", config.reward, unset.reward, {"on_error", "special_tokens"}),
            **_changed("generation", config.generation, unset.generation, OF_SAMPLING),
            **_changed("model", config.model, unset.model, OF_MODELS),
            **_changed("run", config.run, unset.run, {"device"}),
            "run.output_dir": f"{config.run.output_dir}/evaluation",
        },
    )


def after_sft(config: SFTConfig) -> str:
    """The command that trains a reward model from the policy; only its user knows the pairs."""
    where = {"data.train_path": "PAIRS", "run.output_dir": "outputs/reward_model"}
    return command_line("trainers/train_reward_model.py", {"model.path": config.export_path, **where})


def after_reward_model(config: RewardModelConfig, prompts: Prompts) -> str:
    """The command of a PPO run on the prompts of the pairs. Its policy is the model from which the reward model started."""
    settings: dict[str, Any] = {"critic.model.path": config.export_path, "model.path": config.model.path}
    rows = {"data.train_path": _training_rows(config.data)}
    rows |= {"data.val_path": config.data.val_path} if config.data.val_path else {}
    settings |= prompts.settings(config, rows, "train_path")
    if prompts.count < AlgorithmConfig().num_rollout_samples:
        settings["algorithm.num_rollout_samples"] = prompts.count
    return command_line("trainers/train_ppo_local.py", {**settings, "run.output_dir": f"{config.run.output_dir}/ppo"})


def after_preferences(config: Preferences, prompts: Prompts) -> str:
    """The comparison on the held-out prompts of DPO or KTO."""
    settings = prompts.settings(config, _held_out(config.data), "path")
    settings |= {"run.output_dir": f"{config.run.output_dir}/evaluation"}
    return comparison(config.model.path, config.export_path, settings)


def _training_rows(data: TrainingDataConfig) -> str | list[str]:
    names = [name for source in data.training_sources for name in names_of(source)]
    return names[0] if len(names) == 1 else names


def _held_out(data: TrainingDataConfig) -> dict[str, Any]:
    """The source of an evaluation's prompts: the validation rows, or the first training rows."""
    if data.val_path:
        return {"data.path": data.val_path}
    return {"data.path": _training_rows(data), "data.max_prompts": FEW_PROMPTS}


def _layout(layout: str, data: PromptTemplateConfig, export: str) -> dict[str, Any]:
    """The settings that find prompts in rows and wrap them; ``export`` holds the chat template that was set."""
    settings = _changed("data", data, PromptTemplateConfig(), _names(PromptTemplateConfig) - {"today", "chat_template"})
    if data.chat_template is not None:
        settings["data.chat_template"] = f"{export}/chat_template.jinja"
    if data.today is not None and (layout == "messages" or data.apply_chat_template):
        settings["data.today"] = data.today
    return {"data": layout, **settings} if layout != "text" else settings


def _changed(group: str, values: Any, unset: Any, names: Collection[str] | None = None) -> dict[str, Any]:
    """The settings of ``values`` under ``names``, or all, that differ from ``unset``."""
    given = {name: getattr(values, name) for name in sorted(_names(type(unset)) if names is None else names)}
    return {f"{group}.{name}": value for name, value in given.items() if value != getattr(unset, name)}


def _from_here(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _value(value: Any) -> str:
    """``value`` in Hydra's notation."""
    if isinstance(value, list):
        return f"[{','.join(map(_value, value))}]"
    if not isinstance(value, str):
        return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return quoted(value)


def _shell_word(word: str) -> str:
    """``word`` on one line, as a shell reads it."""
    if "\n" not in word and "\r" not in word:
        return shlex.quote(word)
    escapes = {"\\": r"\\", "'": r"\'", "\n": r"\n", "\r": r"\r"}
    return "$'" + "".join(escapes.get(character, character) for character in word) + "'"
