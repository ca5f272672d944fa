"""Turns a checkpoint into the Hugging Face directory that the run's export would have been after that step. A reward model lacks
the statistics of its rewards: training computes them at its end.

The configuration that the run recorded says how the model is built; DeepSpeed's shards are read without DeepSpeed's engine.
"""

import json
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedModel

from nemo_style_rlhf.checkpoint.data import read_data
from nemo_style_rlhf.checkpoint.files import deviations, storage_errors
from nemo_style_rlhf.checkpoint.starts import NEWEST
from nemo_style_rlhf.checkpoint.store import ACTOR, MANIFEST, CheckpointStore
from nemo_style_rlhf.critic_service.store import RECORD, START_WEIGHTS, read_record
from nemo_style_rlhf.engine.engine import CHECKPOINT_TAG
from nemo_style_rlhf.engine.reshape import load_weights
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.digests import model_fingerprint, module_digest
from nemo_style_rlhf.models.export import export_model
from nemo_style_rlhf.models.loading import load_causal_lm, load_tokenizer
from nemo_style_rlhf.models.lora import START, add_lora
from nemo_style_rlhf.models.scalar_loading import starting_critic
from nemo_style_rlhf.ppo.export import write_policy
from nemo_style_rlhf.ppo.saving import IDENTITY_FILE
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.base import rebuilt
from nemo_style_rlhf.schema.common import ModelConfig
from nemo_style_rlhf.schema.critic import PPOCriticConfig
from nemo_style_rlhf.schema.supervised import DPOConfig, KTOConfig, RewardModelConfig, SFTConfig, SupervisedConfig
from nemo_style_rlhf.supervised.checkpoints import IDENTITY, PROGRESS_FILE
from nemo_style_rlhf.supervised.models import starting_policy, starting_reward_model, write_model

STAGES: dict[str, type[SupervisedConfig]] = {
    "statistics_pairs": RewardModelConfig,
    "nll_weight": DPOConfig,
    "desirable_weight": KTOConfig,
}
"""Configuration of a supervised stage by a key that only this stage has; SFT's has none."""
EXPECTED_CHECKPOINT = (
    "a PPO run's checkpoints/step_000050, a critic server's checkpoints/<run>-step_000050, or a supervised stage's "
    "checkpoints/step_00000500.ckpt"
)
_ADVICE = "name the model from which the training started as --model"


@dataclass(frozen=True)
class Found:
    """A checkpoint on disk."""

    kind: str
    """actor, critic or supervised."""
    path: Path
    run: Path
    """The folder of its run."""


def export_checkpoint(checkpoint: Path, target: Path, *, model: str | None = None) -> None:
    """Write ``checkpoint`` as the new folder ``target``; an actor's or a supervised stage's adapter also as
    ``<target>_adapter``.

    Args:
        model: path of the model from which the training started, if it has moved.

    Raises:
        UserError: the checkpoint is not whole, its run's configuration is missing, a folder to write is in the way, the model
            is not the one from which the training started, or the run deletes the checkpoint meanwhile.
    """
    found = find(checkpoint)
    _require_free(target)
    recorded = _recorded(found)
    if found.kind != "critic" and (recorded["model"].get("lora") or {}).get("rank"):
        _require_free(target.with_name(f"{target.name}_adapter"))
    if model is not None:
        own_start = found.kind == "critic" and (recorded.get("value_model") or {}).get("path")
        recorded["value_model" if own_start else "model"]["path"] = model
    export = {"actor": _export_actor, "critic": _export_critic, "supervised": _export_stage}[found.kind]
    try:
        export(found, target, recorded)
    except FileNotFoundError as error:
        if error.filename is not None and not Path(error.filename).is_relative_to(found.path):
            raise
        raise UserError(
            f"{found.path} was deleted while it was read, as a run deletes its old checkpoints: give a newer one"
        ) from error


def _require_free(target: Path) -> None:
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise UserError(f"{target} exists: give a new folder for the exported model")


def find(path: Path) -> Found:
    """The checkpoint at ``path``.

    Raises:
        UserError: ``path`` holds no whole checkpoint.
    """
    given = path.resolve()
    if not given.exists():
        raise UserError(f"there is no {given}: give {EXPECTED_CHECKPOINT}")
    path = given.parent if given.name in (ACTOR, "critic") and given.parent.parent.name == "checkpoints" else given
    run = path.parent.parent
    if (path / "critic" / RECORD).is_file():
        return Found("critic", path / "critic", run)
    if re.fullmatch(r"step_\d{6,}", path.name) and (path / ACTOR).is_dir():
        return Found(ACTOR, path, run)
    if path.suffix == ".ckpt" and (path.is_file() or (path / PROGRESS_FILE).is_file()):
        return Found("supervised", path, run)
    inside = [each for place in (given, given / ACTOR) for each in (place / "checkpoints").glob("*step_*")]
    inside.sort(key=lambda each: each.stat().st_mtime)
    example = f"one of its checkpoints, such as {inside[-1]}" if inside else EXPECTED_CHECKPOINT
    raise UserError(f"{given} is no checkpoint: give {example}")


def _recorded(found: Found) -> dict[str, Any]:
    """The configuration of the run's last start."""
    path = found.run / NEWEST
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(
            f"{path} cannot be read, which says how the model of {found.path} is built: leave the checkpoint in its run's folder"
        ) from error
    if not (isinstance(content, dict) and isinstance(content.get("model"), dict)):
        raise UserError(f"{path} is no configuration of a run: leave the checkpoint in its run's folder")
    if found.kind == "critic" and "critic" in content:
        raise UserError(
            f"{path} was recorded by an earlier version, with keys that have new names: export with that version"
        )
    return content


def _export_actor(found: Found, target: Path, recorded: Mapping[str, Any]) -> None:
    step = int(found.path.name.removeprefix("step_"))
    manifest, damaged = CheckpointStore(found.path.parent, keep_last=1).examined(step)
    if manifest is None:
        incomplete = not (found.path / MANIFEST).is_file()
        raise UserError(
            f"{found.path} is {'not complete' if incomplete else 'damaged'} ({damaged}): give another checkpoint of the run"
        )
    config = rebuilt(PPOActorConfig, recorded)
    _require_start(config.model, json.loads((found.path / ACTOR / IDENTITY_FILE).read_bytes()), found)
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    hf = load_causal_lm(config.model)
    add_lora(hf, config.model)
    load_weights(hf, found.path / ACTOR / "engine" / CHECKPOINT_TAG, prefix="hf.")
    with _writing(target):
        write_policy(hf, target, config, tokenizer)


def _export_critic(found: Found, target: Path, recorded: Mapping[str, Any]) -> None:
    try:
        record = read_record(found.path)
        damaged = deviations(found.path, record.digests, besides=[RECORD])
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        damaged = [RECORD]
    if damaged:
        raise UserError(f"{found.path} is damaged ({damaged[0]}): give another checkpoint of the server")
    config = rebuilt(PPOCriticConfig, recorded)
    critic = starting_critic(config)
    if config.model.lora.rank:
        _require_same(found, config.critic_start.path, record.critic.get(START_WEIGHTS), module_digest(critic))
    add_lora(critic.hf, config.critic_start)
    load_weights(critic.hf, found.path / CHECKPOINT_TAG, prefix="hf.")
    with _writing(target):
        export_model(
            critic.hf, target, source=config.critic_start.path, trust_remote_code=config.model.trust_remote_code
        )


def _export_stage(found: Found, target: Path, recorded: Mapping[str, Any]) -> None:
    schema = next((stage for key, stage in STAGES.items() if key in recorded), SFTConfig)
    config: Any = rebuilt(schema, recorded)
    file = found.path / PROGRESS_FILE if found.path.is_dir() else found.path
    content = read_data(file, mmap=True)
    _require_start(config.model, content.get(IDENTITY, {}), found)
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    if schema is RewardModelConfig:
        hf, prefix = starting_reward_model(config.model, tokenizer).hf, "model.hf."
    else:
        hf, prefix = starting_policy(config.model), "policy.hf."
    if found.path.is_dir():
        load_weights(hf, found.path / "checkpoint", prefix=prefix)
    else:
        _load_state(hf, content["state_dict"], prefix, found)
    with _writing(target):
        write_model(hf, target, config.model, config.data, tokenizer)


def _load_state(hf: PreTrainedModel, state: Mapping[str, Any], prefix: str, found: Found) -> None:
    own = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    trained = {name for name, parameter in hf.named_parameters() if parameter.requires_grad}
    shapes = {name: tensor.shape for name, tensor in hf.state_dict().items()}
    if trained - own.keys() or any(shapes.get(name) != tensor.shape for name, tensor in own.items()):
        raise UserError(f"{found.path} is of a model with other trained parameters: {_ADVICE}")
    hf.load_state_dict(own, strict=False)


def _writing(target: Path) -> AbstractContextManager[None]:
    return storage_errors(f"the model {target}", "make room or give another folder")


def _require_start(model: ModelConfig, identity: Mapping[str, Any], found: Found) -> None:
    """Check that the adapters of a checkpoint were trained on this model."""
    if model.lora.rank:
        _require_same(found, model.path, identity.get(START), model_fingerprint(model.path))


def _require_same(found: Found, path: str, was: str | None, given: str) -> None:
    if was not in (None, given):
        raise UserError(f"{found.path} has adapters of a model with {was}, {path} has {given}: {_ADVICE}")
