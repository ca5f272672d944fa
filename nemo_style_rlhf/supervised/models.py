"""The models of the supervised stages: the model at the start of training, and the directory at its end."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nemo_style_rlhf.data.template_files import write_template
from nemo_style_rlhf.models.export import export_model, rehearse_export
from nemo_style_rlhf.models.loading import load_causal_lm, new_causal_lm
from nemo_style_rlhf.models.lora import add_lora, save_adapter
from nemo_style_rlhf.models.scalar import ScalarModel
from nemo_style_rlhf.models.scalar_loading import load_scalar_model
from nemo_style_rlhf.schema.common import ModelConfig
from nemo_style_rlhf.schema.supervised import SupervisedDataConfig, SupervisedModelConfig

Model = TypeVar("Model", bound=ModelConfig)


def training_precision(model: Model) -> Model:
    """``model`` with fp32 weights: for bfloat16, Lightning uses mixed precision over fp32 masters."""
    return dataclasses.replace(model, dtype="float32")


def starting_policy(config: SupervisedModelConfig) -> PreTrainedModel:
    """The causal LM that SFT, DPO and KTO train, with its adapters."""
    model = training_precision(config)
    hf = new_causal_lm(model, model.config_path) if model.init == "random" else load_causal_lm(model)
    add_lora(hf, model)
    return hf


def starting_reward_model(config: SupervisedModelConfig, tokenizer: PreTrainedTokenizerBase) -> ScalarModel:
    """The reward model that is trained, with its adapters."""
    model = load_scalar_model(training_precision(config))
    if model.hf.config.pad_token_id is None:
        model.hf.config.pad_token_id = tokenizer.pad_token_id  # transformers pools the last token before padding
    add_lora(model.hf, config)
    return model


def write_model(
    hf: PreTrainedModel, target: Path, model: SupervisedModelConfig, data: SupervisedDataConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> list[Path]:  # fmt: skip
    """Write the trained ``hf`` in ``model.dtype`` with its tokenizer and templates, and its adapter in a folder next to it.

    Returns:
        The folders written.
    """
    hf.to(getattr(torch, model.dtype))
    export_model(hf, target, **_beside_weights(model, data, tokenizer))
    if not model.lora.rank:
        return [target]
    adapter = target.with_name(f"{target.name}_adapter")
    save_adapter(hf, adapter, model, export=target)
    return [target, adapter]


def rehearse_writing(
    hf: PreTrainedModel, model: SupervisedModelConfig, data: SupervisedDataConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise UserError if :func:`write_model` would fail after the training."""
    rehearse_export(hf, **_beside_weights(model, data, tokenizer))


def _beside_weights(
    model: SupervisedModelConfig, data: SupervisedDataConfig, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    write_notes = partial(
        write_template, template=data.prompt_template, tokenizer=tokenizer, chat_template=data.chat_template,
        append_eos=data.append_eos,
    )  # fmt: skip
    return {
        "source": model.path, "config_source": model.config_path, "write_notes": write_notes,
        "trust_remote_code": model.trust_remote_code,
    }  # fmt: skip
