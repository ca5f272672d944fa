"""Backbone and scalar head: the reward model, and the critic that starts from it."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, PreTrainedModel

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.packing import is_packed, pack


class ScalarModel(nn.Module):
    """A Hugging Face decoder that classifies sequences or tokens, with its score head read at every token.

    The score at the last token is the reward; in a critic, entry t estimates the return from the state after tokens 0..t.
    """

    def __init__(self, hf: PreTrainedModel, *, normalize: bool = False) -> None:
        """
        Args:
            normalize: return (score - mean) / std, with the statistics that the model's training stored in its config.

        Raises:
            UserError: the model has no score head, or ``normalize`` is set and its config has no statistics.
        """
        super().__init__()
        self.hf = hf
        self._packed = is_packed(hf)
        require_score_head(hf)
        self._mean, self._std = _reward_statistics(hf.config) if normalize else (0.0, 1.0)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Map [B, T] int64 token ids and mask to [B, T] float32 scores; 0 in the padding of a packed model."""
        if self._packed:
            packed = pack(input_ids, attention_mask)
            hidden = self.hf.base_model(**packed.inputs).last_hidden_state[0]
            return packed.scatter(self._read(hidden))
        hidden = self.hf.base_model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self._read(hidden)

    def _read(self, hidden: Tensor) -> Tensor:
        return (self.hf.score(hidden).squeeze(-1).float() - self._mean) / self._std


def scalar_class(hf_config: Any) -> Any:
    """The auto class that loads a checkpoint's whole head: a token classifier's has a bias, a sequence classifier's has none."""
    tokens = any(name.endswith("ForTokenClassification") for name in hf_config.architectures or ())
    return AutoModelForTokenClassification if tokens else AutoModelForSequenceClassification


def require_score_head(hf: PreTrainedModel) -> None:
    """
    Raises:
        UserError: ``hf`` has no head with one score per token.
    """
    if not isinstance(head := getattr(hf, "score", None), nn.Linear) or head.out_features != 1:
        raise UserError(
            f"{type(hf).__name__} has no `score` head over every token: a reward model must be a decoder with "
            "AutoModelForSequenceClassification and num_labels=1"
        )


def set_reward_statistics(hf_config: Any, mean: float, std: float) -> None:
    """Store the statistics with which :class:`ScalarModel` normalizes; Hugging Face keeps them in config.json."""
    hf_config.reward_mean, hf_config.reward_std = mean, std


def _reward_statistics(hf_config: Any) -> tuple[float, float]:
    for names in (("reward_mean", "reward_std"), ("mean", "std")):  # ours, and OpenRLHF's
        mean, std = (getattr(hf_config, name, None) for name in names)
        if isinstance(mean, int | float) and isinstance(std, int | float) and std:
            return float(mean), float(std)
    raise UserError(
        f"{hf_config.name_or_path} has no reward_mean and reward_std in its config.json to normalise rewards by: train it "
        "with trainers/train_reward_model.py, add them, or set normalize_rewards=false"
    )


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
