"""Backbone and scalar head: the reward model, and the critic that starts from it."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, PreTrainedModel
from transformers.modeling_layers import GenericForTokenClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.heads import StoredHead
from nemo_style_rlhf.models.packing import is_packed, pack


class ScalarModel(nn.Module):
    """A Hugging Face decoder that classifies sequences or tokens, with its score head read at every token.

    The score at the last token is the reward; in a critic, entry t estimates the return from the state after tokens 0..t.
    """

    def __init__(self, hf: PreTrainedModel, *, normalize: bool = False) -> None:
        """``normalize``: return (score - mean) / std, with the statistics that the model's training stored in its config.

        Raises:
            UserError: the model has no score head, or ``normalize`` is set and its config has no statistics.
        """
        super().__init__()
        self.hf = hf
        self._packed = is_packed(hf)
        require_score_head(hf)
        self._mean, self._std = _reward_statistics(hf.config) if normalize else (0.0, 1.0)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Map [B, T] int64 token ids, padded on the right, and mask to [B, T] float32 scores; scores of padding are undefined."""
        if self._packed:
            packed = pack(input_ids, attention_mask)
            hidden = self.hf.base_model(**packed.inputs).last_hidden_state[0]
            return packed.scatter(self._read(hidden))
        # No mask: nothing looks at later tokens, and with one, attention on a GPU would leave its fastest kernel.
        return self._read(self.hf.base_model(input_ids=input_ids).last_hidden_state)

    def rewards(self, token_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Map [B, T] int64 token ids and mask, padded on the right, to float32 [B]."""
        scores = self(token_ids, attention_mask)
        return sequence_scores(scores, token_ids, attention_mask.sum(-1), pad_token(self.hf))

    def _read(self, hidden: Tensor) -> Tensor:
        return (self.hf.score(hidden).squeeze(-1).float() - self._mean) / self._std


class PooledModel(nn.Module):
    """A Hugging Face encoder that classifies whole sequences. It gives no values: an encoder's score of a token depends on later
    tokens."""

    def __init__(self, hf: PreTrainedModel, weights: Tensor, *, separator: int | None, normalize: bool = False) -> None:
        """Combine the head's labels by ``weights``, float32 [labels].

        Args:
            separator: the token between prompt and response, after which tokens are of another type; None for one type.
            normalize: as for :class:`ScalarModel`.
        """
        super().__init__()
        self.hf = hf
        self.register_buffer("weights", weights, persistent=False)
        self._separator = separator
        self._mean, self._std = _reward_statistics(hf.config) if normalize else (0.0, 1.0)

    def rewards(self, token_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """As :meth:`ScalarModel.rewards`."""
        inputs = {"input_ids": token_ids, "attention_mask": attention_mask}
        if self._separator is not None:
            passed = (token_ids == self._separator).long().cumsum(-1)
            inputs["token_type_ids"] = (
                (passed > 0) & (token_ids != self._separator) | (passed > 1)
            ).long() * attention_mask
        scores = self.hf(**inputs).logits.float() @ self.weights
        return (scores - self._mean) / self._std


def pad_token(hf: PreTrainedModel) -> int | None:
    """Id of the pad token; models of several modalities name it in the config of their language model."""
    own: int | None = getattr(hf.config, "pad_token_id", None)
    return getattr(hf.config.get_text_config(), "pad_token_id", None) if own is None else own


def max_positions(hf: PreTrainedModel) -> int | None:
    """Tokens of the longest sequence; None without a limit."""
    limit: int | None = getattr(hf.config.get_text_config(), "max_position_embeddings", None)
    table = getattr(getattr(hf.base_model, "embeddings", None), "position_embeddings", None)
    if limit is not None and isinstance(table, nn.Embedding) and table.padding_idx is not None:
        return limit - table.padding_idx - 1  # RoBERTa numbers positions from there on
    return limit


def scalar_class(hf_config: Any, head: StoredHead | None = None) -> Any:
    """The auto class that loads a checkpoint's whole head, or as much of it as one can: a token classifier's head has a bias, a
    sequence classifier's has none, and in some families the token classifier's has another name."""
    if head is None:
        tokens = any(name.endswith("ForTokenClassification") for name in hf_config.architectures or ())
    else:
        token_class = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING.get(type(hf_config), None)
        tokens = head.has_bias and token_class is not None and issubclass(token_class, GenericForTokenClassification)
    return AutoModelForTokenClassification if tokens else AutoModelForSequenceClassification


def add_bias(hf: PreTrainedModel, bias: Tensor) -> None:
    """Give the score head of a sequence classifier a bias."""
    hf.score.bias = nn.Parameter(bias.to(hf.score.weight.dtype))  # type: ignore[union-attr, arg-type]


def require_score_head(hf: PreTrainedModel) -> nn.Linear:
    """The head with one score per token.

    Raises:
        UserError: ``hf`` has none.
    """
    if not isinstance(head := getattr(hf, "score", None), nn.Linear) or head.out_features != 1:
        raise UserError(
            f"{type(hf).__name__} has no `score` head over every token: a critic, and a reward model beside it, must be a "
            "decoder with one linear score head (docs/models.md)"
        )
    return head


def set_reward_statistics(hf_config: Any, mean: float, std: float) -> None:
    """Store the statistics with which :class:`ScalarModel` normalizes; Hugging Face keeps them in config.json."""
    hf_config.reward_mean, hf_config.reward_std = mean, std


def has_reward_statistics(hf_config: Any) -> bool:
    """True if the config holds the statistics that normalize rewards."""
    return _stored_statistics(hf_config) is not None


def _reward_statistics(hf_config: Any) -> tuple[float, float]:
    if (stored := _stored_statistics(hf_config)) is None:
        raise UserError(
            f"{hf_config.name_or_path} has no reward_mean and reward_std in its config.json to normalize rewards with: train it "
            "with trainers/train_reward_model.py, add them, or turn off normalize_rewards"
        )
    return stored


def _stored_statistics(hf_config: Any) -> tuple[float, float] | None:
    for names in (("reward_mean", "reward_std"), ("mean", "std")):  # ours, and OpenRLHF's
        mean, std = (getattr(hf_config, name, None) for name in names)
        if isinstance(mean, int | float) and isinstance(std, int | float) and std:
            return float(mean), float(std)
    return None


def sequence_scores(token_scores: Tensor, input_ids: Tensor, lengths: Tensor, pad_token_id: int | None) -> Tensor:
    """The score that Hugging Face would pool: at the last token of each sequence that is not the pad token.

    If pad and EOS have the same id, this is the token before the final EOS, exactly as in
    ``AutoModelForSequenceClassification``.

    Args:
        token_scores: [B, T] float32.
        input_ids: [B, T] int64, padded on the right.
        lengths: [B] int64.
        pad_token_id: from the model's config; None reads the last token.

    Returns:
        [B] float32.
    """
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    counted = positions < lengths[:, None]
    if pad_token_id is not None:
        counted &= input_ids != pad_token_id
    last = (positions * counted).argmax(-1)
    return token_scores.gather(1, last[:, None]).squeeze(1)
