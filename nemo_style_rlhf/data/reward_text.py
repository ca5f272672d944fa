"""Prompt and response as the token ids a reward model was trained on."""

from transformers import PreTrainedTokenizerBase

from nemo_style_rlhf.data.encoding import Encoder
from nemo_style_rlhf.data.templates import read_template, render


class RewardText:
    """Forms sequences as ``data/supervised.py`` forms its preference pairs: template, prompt, response, end-of-text."""

    def __init__(self, model_dir: str, tokenizer: PreTrainedTokenizerBase, *, append_eos: bool | None) -> None:
        """Template and end-of-text are as noted beside the model; without a note, no template and an end-of-text.

        Args:
            append_eos: overrides the note. A tokenizer without EOS was trained without, since the trainer refuses true.
        """
        note = read_template(model_dir)
        self._template: str | None = note.get("template")
        self._encoder = Encoder(tokenizer)
        append_eos = note.get("append_eos", True) if append_eos is None else append_eos
        self._append_eos = append_eos and tokenizer.eos_token_id is not None

    def token_ids(self, prompt: str, response: str, *, rendered: bool = False) -> list[int]:
        """Needs the tokenizer only, so that it may run while the models are busy.

        Args:
            prompt: a user's own words, which the template of training is put around.
            rendered: ``prompt`` comes from a chat template that wrote all special tokens, of this tokenizer.
        """
        prompt = prompt if rendered else render(self._template, prompt)
        prompt_ids = self._encoder.rendered(prompt) if rendered else self._encoder.prompt(prompt)
        return prompt_ids + self._encoder.response(
            prompt, prompt_ids, response, append_eos=self._append_eos, rendered=rendered
        )
