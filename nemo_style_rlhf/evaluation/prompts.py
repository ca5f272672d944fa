"""Loads the same prompts for every checkpoint, tokenized in the way that the checkpoint expects."""

import logging
from collections.abc import Sequence

from transformers import AutoConfig, PreTrainedTokenizerBase

from nemo_style_rlhf.data.prompts import Prompt, load_prompts
from nemo_style_rlhf.data.template_files import check_template, log_date
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.tokenizer import load_tokenizer
from nemo_style_rlhf.schema.evaluation import Checkpoint, EvaluationConfig

log = logging.getLogger(__name__)


def prompts_of(config: EvaluationConfig) -> dict[str, list[Prompt]]:
    """The prompts of each checkpoint by name, with the same ids in the same order.

    A prompt that is too long for one checkpoint's tokenizer is left out for all of them.

    Raises:
        UserError: a checkpoint or the prompts are missing, or they do not fit together.
    """
    loaded: dict[str, list[Prompt]] = {}
    for checkpoint in config.parsed_checkpoints:
        tokenizer = fitting_tokenizer(checkpoint, config)
        log_date(config.data, tokenizer)
        loaded[checkpoint.name], report = load_prompts(config.data.path, config.data, tokenizer)
        log.info("%s: %s", checkpoint.name, report)
    return common_prompts(config, loaded)


def fitting_tokenizer(checkpoint: Checkpoint, config: EvaluationConfig) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer.

    Raises:
        UserError: it cannot be loaded, or the checkpoint was trained with another template.
    """
    tokenizer = load_tokenizer(checkpoint.path, trust_remote_code=config.model.trust_remote_code)
    check_template(checkpoint.path, config.data, tokenizer)
    return tokenizer


def common_prompts(config: EvaluationConfig, loaded: dict[str, list[Prompt]]) -> dict[str, list[Prompt]]:
    """The prompts of ``loaded``, by the checkpoint's name, that every checkpoint has; at most ``data.max_prompts``.

    Raises:
        UserError: there are none, or they do not fit a checkpoint.
    """
    kept = _common_ids(list(loaded.values()), config.data.max_prompts)
    if not kept:
        raise UserError(
            f"{config.data.path} has no prompt that every checkpoint's tokenizer can take: raise data.max_prompt_length"
        )
    common = {name: [prompt for prompt in prompts if prompt.prompt_id in kept] for name, prompts in loaded.items()}
    for checkpoint in config.parsed_checkpoints:
        _check_length(checkpoint, config, common[checkpoint.name])
    if config.generation.backend == "hf" and any(
        prompt.sampling.stop for prompts in common.values() for prompt in prompts
    ):
        raise UserError("generation.backend=hf knows no stop strings, but prompts bring their own: use vllm")
    return common


def max_model_length(config: EvaluationConfig, prompts: Sequence[Prompt]) -> int:
    """Length in tokens of the longest prompt with a full response."""
    return max(len(prompt.token_ids) for prompt in prompts) + config.generation.max_length


def _common_ids(groups: Sequence[Sequence[Prompt]], limit: int) -> set[int]:
    """The ids that occur in all groups, at most the first ``limit``."""
    common = set.intersection(*({prompt.prompt_id for prompt in prompts} for prompts in groups))
    return set(sorted(common)[:limit]) if limit else common


def _check_length(checkpoint: Checkpoint, config: EvaluationConfig, prompts: Sequence[Prompt]) -> None:
    hf_config = AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=config.model.trust_remote_code)
    limit = getattr(hf_config.get_text_config(), "max_position_embeddings", None)  # ALiBi models have none
    needed = max_model_length(config, prompts)
    if limit is not None and needed > limit:
        raise UserError(
            f"the longest prompt with generation.max_length={config.generation.max_length} makes {needed} tokens, more than "
            f"the {limit} positions of {checkpoint.path}: lower data.max_prompt_length or generation.max_length"
        )
