"""Prompt and response as the token ids a reward model was trained on."""

from transformers import PreTrainedTokenizerBase

from nemo_style_rlhf.data.encoding import Encoder
from nemo_style_rlhf.data.templates import read_template, render
from nemo_style_rlhf.schema.data import PLACEHOLDER


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
            prompt: with or without the template of training, which stands around it once.
            rendered: ``prompt`` comes from a chat template that wrote all special tokens, of this tokenizer.
        """
        prompt = prompt if rendered or self._is_templated(prompt) else render(self._template, prompt)
        prompt_ids = self._encoder.rendered(prompt) if rendered else self._encoder.prompt(prompt)
        return prompt_ids + self._encoder.response(
            prompt, prompt_ids, response, append_eos=self._append_eos, rendered=rendered
        )

    def _is_templated(self, prompt: str) -> bool:
        """Whether the policy, trained with the same template, has put ``prompt`` into it already."""
        if self._template is None:
            return False
        before, after = self._template.split(PLACEHOLDER)
        return prompt.startswith(before) and prompt.removeprefix(before).endswith(after)
