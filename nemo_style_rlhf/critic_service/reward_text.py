"""Prompt and response as the token ids a reward model was trained on."""

import json
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from nemo_style_rlhf.data.encoding import Encoder
from nemo_style_rlhf.data.templates import TEMPLATE_FILE, render


class RewardText:
    """Forms sequences as ``data/supervised.py`` forms its preference pairs: template, prompt, response, end-of-text."""

    def __init__(self, model_dir: str, tokenizer: PreTrainedTokenizerBase, *, append_eos: bool) -> None:
        """The prompt template is the one noted beside the model, none where there is no note.

        Args:
            append_eos: ``data.append_eos`` of the training; a tokenizer without EOS was trained with false, since the
                trainer refuses true.
        """
        note = Path(model_dir) / TEMPLATE_FILE
        self._template: str | None = json.loads(note.read_text())["template"] if note.is_file() else None
        self._encoder = Encoder(tokenizer)
        self._append_eos = append_eos and tokenizer.eos_token_id is not None

    def token_ids(self, prompt: str, response: str) -> list[int]:
        """Needs the tokenizer only, so that it may run while the models are busy."""
        prompt = render(self._template, prompt)
        prompt_ids = self._encoder.prompt(prompt)
        return prompt_ids + self._encoder.response(prompt, prompt_ids, response, append_eos=self._append_eos)
