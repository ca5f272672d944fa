"""Loads reward models, and the critics that start from them or from a language model."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.heads import STATISTICS, StoredHead, StoredWeights, stored_head
from nemo_style_rlhf.models.kinds import (
    fitting_weights,
    is_pooled,
    language_model,
    require_decoder,
    require_reward_head,
    require_weights_of_labels,
)
from nemo_style_rlhf.models.loading import load_pretrained
from nemo_style_rlhf.models.scalar import (
    PooledModel,
    ScalarModel,
    add_bias,
    has_reward_statistics,
    require_score_head,
    scalar_class,
    set_reward_statistics,
)
from nemo_style_rlhf.models.tokenizer import first_line, load_tokenizer, require_directory
from nemo_style_rlhf.schema.common import ModelConfig
from nemo_style_rlhf.schema.critic import PPOCriticConfig

log = logging.getLogger(__name__)


def load_reward_model(
    config: ModelConfig, *, normalize: bool = False, label_weights: Sequence[float] | None = None
) -> ScalarModel | PooledModel:
    """The reward model at ``config.path``: a decoder with a score head (:data:`heads.HEADS`), or an encoder that classifies
    sequences.

    Args:
        normalize: divide rewards by their standard deviation after subtracting their mean; see :class:`ScalarModel`.
        label_weights: the reward is the sum of the head's labels, each times its weight.

    Raises:
        UserError: the model has no head, or several labels and no ``label_weights``, or is an encoder-decoder.
    """
    hf_config, head = _config_and_head(config)
    require_reward_head(config.path, hf_config, head)
    if is_pooled(hf_config, head):
        hf = load_pretrained(AutoModelForSequenceClassification, config)
        weights = _label_weights(config.path, hf.config.num_labels, label_weights)
        tokenizer = load_tokenizer(config.path, trust_remote_code=config.trust_remote_code)
        typed = "token_type_ids" in tokenizer.model_input_names and getattr(hf.config, "type_vocab_size", 0) > 1
        return PooledModel(hf, weights, separator=tokenizer.sep_token_id if typed else None, normalize=normalize)
    return ScalarModel(_with_head(config, hf_config, head, label_weights), normalize=normalize)


def load_scalar_model(config: ModelConfig) -> ScalarModel:
    """The model at ``config.path`` with one score per token, to train as a reward model. A language model gets a new head,
    initialized by the global torch generator as in transformers.

    Raises:
        UserError: the model is an encoder, an encoder-decoder or has several labels.
    """
    return ScalarModel(_with_head(config, *_config_and_head(config), None))


def load_critic(
    config: ModelConfig, *, seed: int, normalize: bool = False, label_weights: Sequence[float] | None = None
) -> ScalarModel:
    """The critic that starts from a reward model, an earlier critic, or a language model with a new head.

    A new head is drawn from a normal distribution with the deviation 1 / (hidden size + 1), as in OpenRLHF, so that the first
    values are near 0.

    Args:
        seed: seed of the new head.
        normalize: put the values on the scale of normalized rewards, if statistics are stored with the model.
        label_weights: as for :func:`load_reward_model`; a start with a single label, such as an earlier critic, takes no more
            than one.
    """
    hf_config, head = _config_and_head(config)
    fitting = None if head is None else fitting_weights(head, label_weights)
    hf = _with_head(config, hf_config, head, fitting)
    if head is None:
        score = require_score_head(hf)
        generator = torch.Generator().manual_seed(seed)
        nn.init.normal_(score.weight, std=1 / (score.in_features + 1), generator=generator)
        log.info("the critic starts from %s with a new score head (run.seed=%d)", config.path, seed)
    return ScalarModel(hf, normalize=normalize and has_reward_statistics(hf.config))


def starting_critic(config: PPOCriticConfig) -> ScalarModel:
    """The critic of a critic server before training, without adapters."""
    return load_critic(
        config.critic_start, seed=config.run.seed, normalize=config.reward_model.normalize_rewards,
        label_weights=config.reward_model.label_weights,
    )  # fmt: skip


def _config_and_head(config: ModelConfig) -> tuple[Any, StoredHead | None]:
    """Config and score head of the checkpoint, before it is loaded."""
    require_directory(config.path)
    try:
        hf_config = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"{config.path} is not a model that transformers can load: {first_line(error)}") from error
    require_decoder(config.path, hf_config)
    return hf_config, stored_head(config.path)


def _with_head(
    config: ModelConfig, hf_config: Any, head: StoredHead | None, label_weights: Sequence[float] | None
) -> PreTrainedModel:
    """The checkpoint with one score per token. A language model gets a new head; several labels are added up by
    ``label_weights``."""
    auto_class = scalar_class(hf_config, head)
    if head is None:
        new = {"score.weight"} if language_model(hf_config) else ()
        return load_pretrained(auto_class, config, may_miss=new, num_labels=1)
    weights = _label_weights(config.path, head.labels, label_weights)
    hf = load_pretrained(
        auto_class, config, unread=head.beside(mixed=label_weights is not None), key_mapping=head.key_mapping,
        num_labels=head.labels, may_miss={"score.weight", "score.bias"} if head.apart else (),
    )  # fmt: skip
    if head.apart:
        _take_head(require_score_head(hf), head, StoredWeights(config.path))
    if head.key_mapping:  # an export would undo it, and so restore the head's old name
        hf._weight_conversions = [each for each in hf._weight_conversions if "score." not in each.target_patterns]
    if head.has_bias and isinstance(hf.score, nn.Linear) and hf.score.bias is None:
        add_bias(hf, StoredWeights(config.path).tensor(f"{head.name}.bias"))
    if label_weights is not None:
        _combine_labels(hf, weights)
    if head.has_statistics and not has_reward_statistics(hf.config):
        stored = StoredWeights(config.path)
        set_reward_statistics(hf.config, *(float(stored.tensor(name)) for name in STATISTICS))
    return hf


@torch.no_grad()
def _take_head(score: nn.Linear, head: StoredHead, stored: StoredWeights) -> None:
    score.weight.copy_(stored.tensor(f"{head.name}.weight"))
    if score.bias is not None:
        score.bias.copy_(stored.tensor(f"{head.name}.bias") if head.has_bias else torch.zeros_like(score.bias))


def _label_weights(path: str, labels: int, given: Sequence[float] | None) -> Tensor:
    """The weight of each label, float32 [labels].

    Raises:
        UserError: there is not one weight for each label.
    """
    require_weights_of_labels(path, labels, given)
    return torch.tensor([1.0] if given is None else list(given), dtype=torch.float32)


@torch.no_grad()
def _combine_labels(hf: PreTrainedModel, weights: Tensor) -> None:
    """Replace the labels of the head by their weighted sum, a linear head, too."""
    score = hf.score
    assert isinstance(score, nn.Linear)
    score.weight = nn.Parameter((weights @ score.weight.float())[None].to(score.weight.dtype))
    if score.bias is not None:
        score.bias = nn.Parameter((weights @ score.bias.float())[None].to(score.bias.dtype))
    score.out_features = hf.num_labels = hf.config.num_labels = 1
