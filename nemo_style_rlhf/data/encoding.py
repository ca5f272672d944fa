"""Turns text into token ids, in the same way in every stage."""

import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2

from nemo_style_rlhf.data.records import Dropped
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.chat import Message, is_parts, plain_text

if TYPE_CHECKING:  # rows are checked before transformers, and torch with it, is imported
    from transformers import PreTrainedTokenizerBase


class Encoder:
    """Tokenizes prompts and responses."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", *, chat_template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        # Some tokenizers close every text with EOS, but a prompt must stay open. The tokens of an ordinary text distinguish
        # a closing EOS from an opening BOS even if both are the same token.
        probe = tokenizer("a")["input_ids"]
        self._closes_with_eos = (
            tokenizer.eos_token_id is not None and len(probe) > 1 and probe[-1] == tokenizer.eos_token_id
        )
        self._opens_with_bos = len(probe) > 1 and probe[0] == tokenizer.bos_token_id

    def prompt(self, text: str) -> list[int]:
        """``tokenizer(text)`` with its BOS, but without an EOS at the end, and with only one BOS if a template in ``text``
        already wrote one."""
        ids = list(self.tokenizer(text)["input_ids"])
        if self._closes_with_eos:
            del ids[-1]
        if self._opens_with_bos and ids[1:2] == [self.tokenizer.bos_token_id]:
            del ids[0]
        return ids

    def response(
        self, prompt: str, prompt_ids: Sequence[int], response: str, *, append_eos: bool, rendered: bool = False
    ) -> list[int]:
        """The tokens that follow ``prompt_ids`` when ``response`` follows ``prompt``.

        Both texts are tokenized together, since many tokenizers mark the beginning of a word by the space before it. If that
        changes the prompt's tokens, the response is tokenized by itself, as a policy would have to write it.

        Args:
            append_eos: end with exactly one EOS.
            rendered: whether the texts come from a chat template, special tokens included.

        Raises:
            UserError: ``append_eos`` is set and the tokenizer has no EOS.
        """
        together = self.rendered(prompt + response) if rendered else self.prompt(prompt + response)
        if together[: len(prompt_ids)] == list(prompt_ids):
            ids = together[len(prompt_ids) :]
        else:
            ids = list(self.tokenizer(response, add_special_tokens=False)["input_ids"])
        if append_eos:
            if self.tokenizer.eos_token_id is None:
                raise UserError("the tokenizer has no end-of-text token: give it one or set data.append_eos=false")
            eos = self.tokenizer.eos_token_id
            if rendered and eos in ids:  # no policy writes the template's text after EOS, often a line break
                del ids[len(ids) - ids[::-1].index(eos) :]
            elif ids[-1:] != [eos]:
                ids.append(eos)
        return ids

    def chat(
        self, messages: list[Message], *, add_generation_prompt: bool, tools: list[dict[str, Any]] | None = None
    ) -> str:
        """Render ``messages`` with the chat template, which may describe ``tools`` (JSON schemas) at the beginning.

        Raises:
            UserError: there is no chat template.
            Dropped: the template refuses these messages, or leaves out a turn that is not the assistant's.
        """
        if self.chat_template is None and self.tokenizer.chat_template is None:
            raise UserError("messages need a chat template and the tokenizer has none: set data.chat_template")
        render = partial(self._render, tools=tools, add_generation_prompt=add_generation_prompt)
        of_parts = [message for message in messages if is_parts(message.get("content"))]
        try:
            text = render(messages)
        except Dropped:
            if not of_parts:
                raise
            text = None
        # A template that knows no parts refuses them, writes the list itself, or leaves them out.
        if text is None or any(str(each["content"]) in text or not _holds(text, each) for each in of_parts):
            text = render(
                [
                    {**message, "content": plain_text(message)} if message in of_parts else message
                    for message in messages
                ]
            )
        for message in messages:
            if message["role"] != "assistant" and not _holds(text, message):
                raise Dropped(f"with a turn of the role {message['role']!r}, which the chat template leaves out")
        return text

    def _render(
        self, messages: list[Message], *, add_generation_prompt: bool, tools: list[dict[str, Any]] | None
    ) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    chat_template=self.chat_template,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                )
            )
        # Expressions of the template raise what Python raises; a conversation that transformers refuses raises ValueError.
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise Dropped(f"refused by the chat template ({error})") from error

    def rendered(self, text: str) -> list[int]:
        """Tokens of a text in which the chat template has already written every special token."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


class TokensNeeded(Exception):
    """Without a tokenizer, nothing more can be told about a row."""


class Untokenized(Encoder):
    """Stands where there is no tokenizer yet, so that a row is read up to its first token.

    Every method raises :class:`TokensNeeded`.
    """

    def __init__(self) -> None:
        """It has nothing."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TokensNeeded

    prompt = response = chat = rendered = _refuse


def _holds(text: str, message: Message) -> bool:
    """Whether a rendering holds all that a turn says, as it stands or escaped as JSON; white space around it may be lost."""
    content = message.get("content") or ""
    parts = [part["text"].strip() for part in content] if isinstance(content, list) else [content.strip()]
    return all(
        part in text or any(json.dumps(part, ensure_ascii=ascii)[1:-1] in text for ascii in (False, True))
        for part in parts
    )


def decode_response(tokenizer: "PreTrainedTokenizerBase", prompt: Sequence[int], response: Sequence[int]) -> str:
    """The text of the response after its prompt: decoded alone, it would lose its leading space in SentencePiece models."""
    whole = str(tokenizer.decode([*prompt, *response], skip_special_tokens=True))
    before = str(tokenizer.decode(list(prompt), skip_special_tokens=True))
    if whole.startswith(before):
        return whole.removeprefix(before)
    return str(tokenizer.decode(list(response), skip_special_tokens=True))  # the border splits a character
