"""Turns prompt and response into the token ids that a reward model was trained on."""

from transformers import PreTrainedTokenizerBase

from nemo_style_rlhf.data.encoding import Encoder
from nemo_style_rlhf.data.templates import read_template, render


class RewardText:
    """Forms sequences as ``data/supervised.py`` forms preference pairs: template, prompt, response, end-of-text."""

    def __init__(
        self, model_dir: str, tokenizer: PreTrainedTokenizerBase, *, append_eos: bool | None, as_pair: bool = False
    ) -> None:
        """Take template and end-of-text from the note beside the model; without a note, use no template and an end-of-text.

        Args:
            append_eos: overrides the note. A model whose tokenizer lacks EOS was trained without it, as the trainer refuses true.
            as_pair: form an encoder's pair of texts, with its separators.
        """
        self._as_pair = as_pair
        note = read_template(model_dir)
        self._template: str | None = note.get("template")
        self._encoder = Encoder(tokenizer)
        append_eos = note.get("append_eos", True) if append_eos is None else append_eos
        self._append_eos = append_eos and tokenizer.eos_token_id is not None

    def token_ids(self, prompt: str, response: str, *, rendered: bool = False) -> list[int]:
        """Token ids of a sequence. This needs only the tokenizer, so that it may run while the models are busy.

        Args:
            prompt: the user's own words, to which the template of training is applied.
            rendered: whether ``prompt`` comes from a chat template that wrote all special tokens of this tokenizer.
        """
        prompt = prompt if rendered else render(self._template, prompt)
        if self._as_pair:
            return list(self._encoder.tokenizer(prompt, response)["input_ids"])
        prompt_ids = self._encoder.rendered(prompt) if rendered else self._encoder.prompt(prompt)
        return prompt_ids + self._encoder.response(
            prompt, prompt_ids, response, append_eos=self._append_eos, rendered=rendered
        )
