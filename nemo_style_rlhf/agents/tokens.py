"""Token ids of an episode: what an observation adds to the tokens that the policy has read and sampled.

An episode is one growing list of token ids. Decoding a response and encoding it again may give other tokens, so sampled tokens
stay as they are, and only the text that an observation adds is tokenized. That text is what the chat template writes after the
assistant's last message, up to the end of the next generation prompt. To find it, the last message is replaced by a sentinel
before the conversation is rendered. Rendering only the new messages would lose what separates them from the turn before.
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from nemo_style_rlhf.data.encoding import Encoder
from nemo_style_rlhf.data.records import Dropped
from nemo_style_rlhf.data.turns import said
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.chat import Chat, Message

Tools = list[dict[str, Any]] | None
"""JSON schemas of the tools that a conversation may call."""
Observed = Sequence[Message] | str | Sequence[int]
"""The policy reads this next: messages for the chat template, text, or token ids."""


def continuation(
    encoder: Encoder, messages: Sequence[Message], sampled: Sequence[int], observed: Observed, *, tools: Tools = None
) -> list[int]:
    """The token ids that follow ``sampled`` once the environment has answered.

    The chat template renders messages, with the end of the assistant's turn before them and the next generation prompt after
    them. If ``sampled`` already ends with the end-of-turn marker, or with the token that opens the next turn (some models end
    their turn with it), the ids begin after it. An end-of-text token that the template does not write there stays in the episode,
    and the template's own marker follows it.

    Text is tokenized without special tokens around it, and token ids are returned as they are; the chat template sees neither. An
    empty observation adds nothing.

    Args:
        messages: the conversation so far; the last message is the assistant's, with its ``tool_calls`` if they were parsed.
        sampled: token ids of the assistant's last message as the policy sampled them; empty for an empty response.
        observed: the observation.
        tools: the tools that the first prompt described.

    Raises:
        UserError: the chat template is missing, refuses or leaves out a message of the observation, does not write the
            assistant's answer exactly once, or does not continue the tool calls of a truncated response like an answer.
        ValueError: the last of ``messages`` is not the assistant's, or ``observed`` mixes messages with token ids.
    """
    if not messages or messages[-1].get("role") != "assistant":
        raise ValueError("the last message before an observation must be the assistant's")
    if isinstance(observed, str):
        return _following(encoder, observed)
    ids = [token for token in observed if isinstance(token, int)]
    new = [message for message in observed if not isinstance(message, int)]
    if ids and new:
        raise ValueError("an observation is a list of messages or of token ids, not of both")
    if not new:
        return ids
    try:
        return _rendered(encoder, Chat([*messages, *new], tools), len(messages) - 1, sampled)
    except Dropped as reason:
        raise UserError(
            f"the chat template cannot render an observation ({reason}): return messages that it can, a text or token ids"
        ) from reason


@dataclass(frozen=True)
class _Tail:
    """The end of a rendered conversation, from the end of the assistant's last message."""

    text: str
    ids: list[int]
    """Token ids of ``text``."""
    opening: list[int]
    """Token ids before the observation's first content: the end of the assistant's turn and the beginning of the next turn."""


def _rendered(encoder: Encoder, chat: Chat, answer: int, sampled: Sequence[int]) -> list[int]:
    """The continuation after message number ``answer`` of ``chat``, the assistant's last message."""
    # No text contains its own digest, so the sentinel occurs in no message. Its first letter is not hexadecimal, so it does not
    # overlap itself either.
    sentinel = "x" + hashlib.sha256(chat.to_json().encode()).hexdigest()
    special = {*encoder.tokenizer.all_special_ids, *encoder.tokenizer.added_tokens_decoder}
    call = None
    if chat.messages[answer].get("tool_calls"):
        call = _tail(encoder, chat, answer, _with_a_call_of(chat.messages[answer], sentinel), sentinel)
        if call and sampled and sampled[-1] in special and sampled[-1] in call.opening:
            return call.ids[call.opening.index(sampled[-1]) + 1 :]
    # A call whose end of turn is missing is continued like a plain answer. Otherwise the end of the call would be written again.
    plain = _tail(encoder, chat, answer, said("assistant", sentinel), sentinel)
    if plain is None:
        raise UserError("the chat template leaves out an answer: set data.chat_template to another")
    if call and not call.text.endswith(plain.text):
        raise UserError(
            "the response ends with no token that the chat template writes after a tool call, and the template does not continue "
            "a call like a plain answer: leave tool_calls out of the message of a truncated response"
        )
    return plain.ids[_sampled_of(plain.opening, sampled, special) :]


def _with_a_call_of(message: Message, text: str) -> Message:
    """``message`` with ``text`` as the only argument of its last tool call, and without the policy's other text."""
    *calls, last = message["tool_calls"]
    function = last.get("function", last)
    as_json = isinstance(function.get("arguments"), str)
    function = {**function, "arguments": f'{{"text": "{text}"}}' if as_json else {"text": text}}
    last = {**last, "function": function} if "function" in last else function
    return {**said("assistant", ""), "tool_calls": [*calls, last]}


def _tail(encoder: Encoder, chat: Chat, answer: int, instead: Message, sentinel: str) -> _Tail | None:
    """Render the conversation, and cut it after ``sentinel``.

    Args:
        instead: replaces message number ``answer``, and holds ``sentinel``.

    Returns:
        None if the template does not write ``sentinel``.

    Raises:
        UserError: the template writes ``sentinel`` more than once.
        Dropped: the template refuses or leaves out a message.
    """
    first = answer + 1
    # Up to the content of the first new message, the template's output does not depend on that content.
    messages = [*chat.messages[:answer], instead, *chat.messages[first:]]
    changed = [*messages[:first], {**messages[first], "content": sentinel[::-1]}, *messages[first + 1 :]]
    text, other = (
        encoder.chat(each, add_generation_prompt=True, tools=chat.tools).split(sentinel) for each in (messages, changed)
    )
    if len(text) > 2:
        raise UserError(
            f"the chat template writes an answer {len(text) - 1} times, expected once: set data.chat_template to another"
        )
    if len(text) == 1:
        return None
    ids, other_ids = (_following(encoder, parts[-1]) for parts in (text, other))
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(ids, other_ids))
    return _Tail(text[1], ids, [token for token, _ in shared])


def _sampled_of(opening: list[int], sampled: Sequence[int], special: Collection[int]) -> int:
    """Number of tokens at the beginning of ``opening`` that end the assistant's turn and were already sampled."""
    first = next((position for position, token in enumerate(opening) if token in special), None)
    if first is not None and list(sampled[-1:]) == [opening[first]]:
        return first + 1
    # A marker of several tokens. The last may be ordinary text.
    lengths = range(min(len(opening), len(sampled)), 0, -1)
    return next((length for length in lengths if list(sampled[-length:]) == opening[:length]), 0)


def _following(encoder: Encoder, text: str) -> list[int]:
    """Token ids of ``text`` in the middle of a conversation. At the beginning, many tokenizers put a space before it."""
    before = "a"
    ids = encoder.rendered(before)
    if encoder.tokenizer.unk_token_id in ids:  # one unknown token may hold a part of the text too
        return encoder.rendered(text)
    return encoder.response(before, ids, text, append_eos=False, rendered=True)
