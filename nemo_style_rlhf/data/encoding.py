"""Turns text into token ids, in the same way in every stage."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2

from nemo_style_rlhf.data.records import Dropped
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.chat import REASONING, Message, is_parts, plain_text, reasoning_of, with_objects, with_texts
from nemo_style_rlhf.schema.model_files import stop_ids, without_rows

if TYPE_CHECKING:  # rows are checked before transformers, and torch with it, is imported
    from transformers import PreTrainedTokenizerBase


class Encoder:
    """Tokenizes prompts and responses."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", *, chat_template: str | None = None, today: str | None = None,
        stops: Collection[int] | None = None, rows: int | None = None,
    ) -> None:  # fmt: skip
        """Tokenize with ``tokenizer``, and render with its chat template or ``chat_template``.

        Args:
            today: the date, as 2026-11-27, for chat templates that write one (they call ``strftime_now``); None is the clock's.
            rows: rows of the model's embedding; a token beyond them is refused. None refuses none.
            stops: ids with which an answer of the chat template may end; None are :func:`stop_ids`.
        """
        self._stops, self._rows = stops, rows
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.today = today
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
        ids = self._ids(text, add_special_tokens=True)
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
            append_eos: end where a policy would: with the stop token that the chat template wrote, or else with exactly one EOS.
            rendered: True if the texts come from a chat template, special tokens included.

        Raises:
            UserError: ``append_eos`` is set and the tokenizer has no EOS.
        """
        together = self.rendered(prompt + response) if rendered else self.prompt(prompt + response)
        if together[: len(prompt_ids)] == list(prompt_ids):
            ids = together[len(prompt_ids) :]
        else:
            ids = self._ids(response)
        if append_eos:
            if self.tokenizer.eos_token_id is None:
                raise UserError("the tokenizer has no end-of-text token: give it one or set data.append_eos=false")
            eos = self.tokenizer.eos_token_id
            ends = [at for at, token in enumerate(ids) if token in self.stops] if rendered else []
            if ends:  # no policy writes the template's text after it, often a line break
                del ids[ends[0] + 1 :]
            elif ids[-1:] != [eos]:
                ids.append(eos)
        return ids

    @property
    def stops(self) -> Collection[int]:
        if self._stops is None:
            self._stops = stop_ids(self.tokenizer)
        return self._stops

    @property
    def _template(self) -> str:
        return str(self.chat_template or self.tokenizer.chat_template)

    @property
    def writes_a_date(self) -> bool:
        """True if the chat template asks for the date."""
        return "strftime_now" in self._template

    def _readable(self, message: Message) -> Message:
        """The message with its reasoning under the name that the chat template reads, and arguments of calls as objects."""
        message, reasoning = with_objects(message), reasoning_of(message)
        known = [name for name in REASONING if reasoning and re.search(rf"\b{name}\b", self._template)]
        return {**message, **dict.fromkeys(known, reasoning)}

    def chat(
        self, messages: list[Message], *, add_generation_prompt: bool, tools: list[dict[str, Any]] | None = None,
        today: str | None = None,
    ) -> str:  # fmt: skip
        """Render ``messages`` with the chat template. It may describe ``tools`` (JSON schemas) at the beginning.

        Args:
            today: another date than the encoder's.

        Raises:
            UserError: the tokenizer has no chat template.
            Dropped: the template refuses these messages, or leaves out a turn that is not the assistant's.
        """
        if self.chat_template is None and self.tokenizer.chat_template is None:
            raise UserError("messages need a chat template and the tokenizer has none: set data.chat_template")
        day = today or self.today
        clock: Mapping[str, Any] = (
            {"strftime_now": datetime.fromisoformat(day).strftime} if day and self.writes_a_date else {}
        )
        render = partial(self._render, tools=tools, add_generation_prompt=add_generation_prompt, clock=clock)
        messages = [self._readable(message) for message in messages]
        of_parts = [message for message in messages if is_parts(message.get("content"))]
        try:
            text = render(messages)
        except Dropped:
            as_texts = [with_texts(message) for message in messages]
            if as_texts != messages:
                with suppress(Dropped):
                    return render(as_texts)
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

    def whole_chat(
        self, messages: list[Message], *, add_generation_prompt: bool, tools: list[dict[str, Any]] | None = None
    ) -> str:
        """:meth:`chat` of a row of data.

        Raises:
            UserError: see there.
            Dropped: see there; or the template leaves out a call or a tool, so that the row would teach something else.
        """
        text = self.chat(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        for what, given in (("a call", _calls(messages)), ("a tool", tools or [])):
            if lost := [name for name in map(_function_name, given) if name not in text]:
                raise Dropped(
                    f"with {what} of {lost[0]!r}, which the chat template leaves out",
                    advice="set data.chat_template to one that writes tools, or take them out of the rows",
                )
        return text

    def _render(
        self, messages: list[Message], *, add_generation_prompt: bool, tools: list[dict[str, Any]] | None,
        clock: Mapping[str, Callable[[str], str]],
    ) -> str:  # fmt: skip
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    chat_template=self.chat_template,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **clock,
                )
            )
        # Expressions of the template raise what Python raises; a conversation that transformers refuses raises ValueError.
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise Dropped(f"refused by the chat template ({error})") from error

    def rendered(self, text: str) -> list[int]:
        """Tokens of a text in which the chat template has already written every special token."""
        return self._ids(text)

    def _ids(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of ``text``.

        Raises:
            UserError: the model has no row in its embedding for one of the tokens.
        """
        ids = list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        if self._rows is not None and ids and (largest := max(ids)) >= self._rows:
            raise UserError(without_rows(self.tokenizer, largest, self._rows))
        return ids


class TokensNeeded(Exception):
    """The row cannot be read further without a tokenizer."""


class Untokenized(Encoder):
    """Placeholder until there is a tokenizer, so that a row is read up to its first token.

    Every method raises :class:`TokensNeeded`.
    """

    def __init__(self) -> None:
        """Skip the initialization that needs a tokenizer."""
        self.today = None

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TokensNeeded

    prompt = response = chat = whole_chat = rendered = _refuse


def _calls(messages: list[Message]) -> list[Any]:
    return [call for message in messages for call in message.get("tool_calls") or ()]


def _function_name(tool: Any) -> str:
    """Name of a tool, or of the one that a call calls, in OpenAI's form or without its wrapper; empty in another form."""
    tool = tool.get("function", tool) if isinstance(tool, dict) else None
    name = tool.get("name") if isinstance(tool, dict) else None
    return name if isinstance(name, str) else ""


def _holds(text: str, message: Message) -> bool:
    """True if a rendering holds all that a turn says, verbatim or escaped as JSON; white space around it may be lost."""
    content = message.get("content") or ""
    parts = [part["text"].strip() for part in content] if isinstance(content, list) else [content.strip()]
    return all(
        part in text or any(json.dumps(part, ensure_ascii=ascii)[1:-1] in text for ascii in (False, True))
        for part in parts
    )


def decode_response(
    tokenizer: "PreTrainedTokenizerBase", prompt: Sequence[int], response: Sequence[int], *,
    special_but: Collection[int] | None = None,
) -> str:  # fmt: skip
    """The text of the response after its prompt: decoded by itself, it would lose its leading space in SentencePiece models.

    Args:
        special_but: keep special tokens, such as the `<think>` of some tokenizers, but not one of these at the end.
    """
    skip = special_but is None
    if special_but is not None and response and response[-1] in special_but:
        response = response[:-1]
    whole = str(tokenizer.decode([*prompt, *response], skip_special_tokens=skip))
    before = str(tokenizer.decode(list(prompt), skip_special_tokens=skip))
    if whole.startswith(before):
        return whole.removeprefix(before)
    return str(tokenizer.decode(list(response), skip_special_tokens=skip))  # the border splits a character
