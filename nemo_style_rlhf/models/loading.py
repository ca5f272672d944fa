"""Loads Hugging Face checkpoints; refuses an unsuitable one in one sentence."""

import logging
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import is_flash_attn_2_available

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.cpu_linear import use_fp32_products
from nemo_style_rlhf.models.kinds import require_full_weights
from nemo_style_rlhf.models.packing import PACKED_ATTENTION, packing_by_name, require_packing
from nemo_style_rlhf.models.tokenizer import first_line, require_directory
from nemo_style_rlhf.models.tokenizer import load_tokenizer as load_tokenizer
from nemo_style_rlhf.schema.common import ModelConfig

log = logging.getLogger(__name__)
LANGUAGE_MODEL_HEADS = ("lm_head.", "embed_out.")
"""Weights that a reward model may have kept from its causal LM; they do not affect scores."""
OLD_BUFFERS = re.compile(r"\.(attn|attention)\.(bias|masked_bias|causal_mask)$|rotary_emb\.(cos|sin)_cached$")
"""Buffers that older releases saved and newer ones compute, and that transformers does not declare ignorable."""
OTHER_MODALITIES = re.compile(
    r"(^|\.)(vision_model|vision_tower|visual|multi_modal_projector|audio_tower|embed_(vision|audio))\."
)
"""Weights of a multimodal model outside of its language model. Only the language model is loaded."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts in configs."""
MAX_NAMED_WEIGHTS = 3
"""A refusal names at most this many weights."""


def load_causal_lm(config: ModelConfig) -> PreTrainedModel:
    """``AutoModelForCausalLM`` at ``config.path`` in ``config.dtype``, on CPU, in eval mode."""
    return load_pretrained(AutoModelForCausalLM, config)


def new_causal_lm(config: ModelConfig, config_path: str | None = None) -> PreTrainedModel:
    """A causal LM with random weights from the global torch generator, of the architecture in ``config_path`` (a config
    JSON; ``config.path``'s own by default)."""
    source = config_path or config.path
    try:
        hf_config = AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code)
        if config.disable_dropout:
            zero_dropout(hf_config)
        with packing_by_name(source):
            model = AutoModelForCausalLM.from_config(
                hf_config, dtype=getattr(torch, config.dtype), attn_implementation=_attention(config),
                trust_remote_code=config.trust_remote_code,
            )  # fmt: skip
    except (OSError, ValueError) as error:
        raise UserError(f"{source} is not a causal LM's config that transformers knows: {first_line(error)}") from error
    if config.disable_dropout:
        switch_off_dropout(model)
    if config.packing:
        require_packing(model)
    return model


def eos_token_ids(generation_config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """End-of-sequence ids of tokenizer and generation config: chat models end a turn with an id that only the latter names."""
    configured = generation_config.eos_token_id if generation_config else None
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({token for token in [*ids, tokenizer.eos_token_id] if token is not None})


def original_dropout(path: str, *, trust_remote_code: bool = False) -> dict[str, float]:
    """The dropout settings in the config of ``path``, to put back into an export."""
    return dropout_settings(AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code))


def dropout_settings(hf_config: Any) -> dict[str, float]:
    return {key: value for key, value in hf_config.to_dict().items() if _is_dropout(key, value)}


def _is_dropout(key: str, value: object) -> bool:
    return ("dropout" in key or key.endswith("drop")) and isinstance(value, float)


def load_pretrained(
    auto_class: Any, config: ModelConfig, *, may_miss: Collection[str] = (), unread: re.Pattern[str] | None = None,
    key_mapping: Mapping[str, str] | None = None, **settings: Any,
) -> PreTrainedModel:  # fmt: skip
    """``auto_class`` at ``config.path`` in ``config.dtype``, on CPU, in eval mode.

    Args:
        may_miss: weights that the global torch generator initializes if the checkpoint lacks them.
        unread: names of weights that the model does not need.
        key_mapping: regular expressions for names of weights, and their replacements.
        settings: replace values of config.json.

    Raises:
        UserError: transformers cannot load it, or the checkpoint is quantized, lacks weights, or holds others.
    """
    require_directory(config.path)
    try:
        hf_config = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code, **settings)
        require_full_weights(config.path, hf_config)
        _refuse_experts(config.path, hf_config.get_text_config())
        if config.disable_dropout:
            zero_dropout(hf_config)
        with packing_by_name(config.path):
            model, report = auto_class.from_pretrained(
                config.path,
                config=hf_config,
                dtype=getattr(torch, config.dtype),
                attn_implementation=_attention(config),
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
                key_mapping=key_mapping,
            )
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"{config.path} cannot be loaded by {auto_class.__name__}: {first_line(error)}") from error
    if missing := sorted(set(report["missing_keys"]) - set(may_miss)):
        raise UserError(
            f"{config.path} lacks the weights {_some(missing)} that {type(model).__name__} needs: "
            "they would be random; give a checkpoint of that kind"
        )
    unexpected = [name for name in report["unexpected_keys"] if unread is None or not unread.match(name)]
    _refuse_unread(config.path, model, unexpected)
    if config.disable_dropout:
        switch_off_dropout(model)
    model.config.use_cache = False
    use_fp32_products(model)
    if config.packing:
        require_packing(model)
    return model.eval()


def _refuse_experts(path: str, hf_config: Any) -> None:
    """Raise UserError if run.deterministic is set and the model has experts: their kernels may not repeat on a GPU."""
    experts = next((found for name in EXPERTS if (found := getattr(hf_config, name, None))), 0)
    if torch.cuda.is_available() and torch.are_deterministic_algorithms_enabled() and experts:
        raise UserError(
            f"run.deterministic=true does not support {path} on a GPU: it has {experts} experts, and no one has seen their "
            "kernels repeat; give run.deterministic=null"
        )


def _refuse_unread(path: str, model: PreTrainedModel, unexpected: Collection[str]) -> None:
    """Raise UserError if one is neither an older release's buffer, nor of another modality, nor a reward model's old head.

    Args:
        unexpected: weights of the checkpoint that ``model`` lacks and that transformers does not declare ignorable.
    """
    unread = {name for name in unexpected if not OLD_BUFFERS.search(name) and not OTHER_MODALITIES.search(name)}
    if hasattr(model, "score"):
        unread = {name for name in unread if not name.startswith(LANGUAGE_MODEL_HEADS)}
    if unread:
        raise UserError(
            f"{path} holds the weights {_some(sorted(unread))} that {type(model).__name__} does not have: they would be "
            "ignored; give a checkpoint of that kind, or load and save it as one with transformers"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED_WEIGHTS} more" if len(names) > MAX_NAMED_WEIGHTS else ""
    return ", ".join(names[:MAX_NAMED_WEIGHTS]) + more


def zero_dropout(hf_config: Any) -> None:
    for key in dropout_settings(hf_config):
        setattr(hf_config, key, 0.0)


def switch_off_dropout(model: PreTrainedModel) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def _attention(config: ModelConfig) -> str:
    if config.packing:
        return PACKED_ATTENTION
    if config.attn_implementation != "auto":
        return config.attn_implementation
    if not torch.cuda.is_available():
        return "eager"  # the CPU backward of SDPA took 29 % of a training step
    return "flash_attention_2" if config.dtype == "bfloat16" and is_flash_attn_2_available() else "sdpa"
