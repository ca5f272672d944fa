"""Backbone and scalar head: the reward model, and the critic that starts from it."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.packing import is_packed, pack


class ScalarModel(nn.Module):
    """A Hugging Face sequence-classification decoder whose score head is read at every token.

    At the last token that is the reward; as a critic, entry t estimates the return from the state after tokens 0..t.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        self._packed = is_packed(hf)
        if not isinstance(head := getattr(hf, "score", None), nn.Linear) or head.out_features != 1:
            raise UserError(
                f"{type(hf).__name__} has no `score` head over every token: a reward model must be a decoder with "
                "AutoModelForSequenceClassification and num_labels=1"
            )

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[B, T] int64 token ids and mask to [B, T] float32 scores; 0 in the padding of a packed model."""
        if self._packed:
            packed = pack(input_ids, attention_mask)
            hidden = self.hf.base_model(**packed.inputs).last_hidden_state[0]
            return packed.scatter(self.hf.score(hidden).squeeze(-1).float())
        hidden = self.hf.base_model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self.hf.score(hidden).squeeze(-1).float()


def sequence_scores(token_scores: Tensor, input_ids: Tensor, lengths: Tensor, pad_token_id: int | None) -> Tensor:
    """The score Hugging Face would pool: at the last token of each sequence that is not the pad token.

    Where pad and EOS are one id that is the token before the final EOS, exactly as in
    ``AutoModelForSequenceClassification``.

    Args:
        token_scores: [B, T] float32.
        input_ids: [B, T] int64, padded on the right.
        lengths: [B] int64.
        pad_token_id: of the model's config; None reads the last token.

    Returns:
        [B] float32.
    """
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    counted = positions < lengths[:, None]
    if pad_token_id is not None:
        counted &= input_ids != pad_token_id
    last = (positions * counted).argmax(-1)
    return token_scores.gather(1, last[:, None]).squeeze(1)
