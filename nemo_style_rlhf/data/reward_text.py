"""Turns prompt and response into the token ids that a reward model was trained on."""

from functools import partial
from typing import TYPE_CHECKING

from nemo_style_rlhf.data.encoding import Encoder
from nemo_style_rlhf.data.template_files import read_template, render
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.chat import Chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RewardText:
    """Forms sequences as ``data/supervised.py`` forms preference pairs: template, prompt, response, end-of-text."""

    def __init__(
        self, model_dir: str, tokenizer: "PreTrainedTokenizerBase", *, append_eos: bool | None, as_pair: bool = False
    ) -> None:
        """Take template and end-of-text from the note next to the model; without a note, use no template and an end-of-text.

        Args:
            append_eos: overrides the note. A model whose tokenizer lacks EOS was trained without it, as the trainer refuses true.
            as_pair: form an encoder's pair of texts, with its separators.
        """
        self._path, self._as_pair = model_dir, as_pair
        note = read_template(model_dir)
        self._template: str | None = note.get("template")
        # A model that was trained before the note told its stop tokens has seen EOS after them.
        self._encoder = Encoder(tokenizer, stops=note.get("stop_token_ids", {tokenizer.eos_token_id}))
        self._trained_here = bool(note) or append_eos is not None
        append_eos = note.get("append_eos", True) if append_eos is None else append_eos
        self._append_eos = append_eos and tokenizer.eos_token_id is not None

    @property
    def reads_conversations(self) -> bool:
        """True if it forms conversations of several turns."""
        return self._encoder.tokenizer.chat_template is not None and not self._as_pair

    def token_ids(self, prompt: str | Chat, response: str) -> list[int]:
        """Token ids of a sequence. This needs only the tokenizer, so that it may run while the models are busy.

        Args:
            prompt: a user's own words, to which the template of training is applied; or a conversation, for the chat template. A
                model without one, or an encoder, takes a conversation's single question as words.

        Raises:
            UserError: the model does not read conversations of several turns, or its chat template refuses this one.
        """
        if isinstance(prompt, Chat):
            if self.reads_conversations:
                try:
                    return self._conversation(prompt, response)
                except Exception as error:  # a template is a program, and fails in any way on what it does not expect
                    reason = f"{type(error).__name__}: {error!s:.200}"
                    raise UserError(
                        f"the chat template of the reward model {self._path} cannot render a conversation ({reason}): take "
                        "it out of the prompts"
                    ) from error
            if prompt.question is None:
                raise UserError(
                    f"the reward model {self._path} reads no conversations of several turns "
                    f"({'it is an encoder' if self._as_pair else 'its tokenizer has no chat template'}): take a decoder whose "
                    "tokenizer has a chat template"
                )
            prompt = prompt.question
        prompt = render(self._template, prompt)
        if self._as_pair:
            return list(self._encoder.tokenizer(prompt, response)["input_ids"])
        prompt_ids = self._encoder.prompt(prompt)
        return prompt_ids + self._encoder.response(prompt, prompt_ids, response, append_eos=self._append_eos)

    def _conversation(self, chat: Chat, response: str) -> list[int]:
        """The conversation with its answer, whole as the chat template writes it; or, of a model trained here, as its pairs were
        formed."""
        write = partial(self._encoder.chat, tools=chat.tools, today=chat.today)
        whole = write([*chat.messages, {"role": "assistant", "content": response}], add_generation_prompt=False)
        prompt = write(chat.messages, add_generation_prompt=True) if self._trained_here else None
        if prompt is None or not whole.startswith(prompt):
            return self._encoder.rendered(whole)
        prompt_ids = self._encoder.rendered(prompt)
        return prompt_ids + self._encoder.response(
            prompt, prompt_ids, whole[len(prompt) :], append_eos=self._append_eos, rendered=True
        )
