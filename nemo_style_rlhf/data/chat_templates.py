"""Finds out, by rendering conversations, whether a chat template appends turns to a conversation or rewrites its past.

A policy's tokens can be trained in one row if every prompt begins with the prompt and the answer before it. Templates that leave
reasoning out of past answers, or that open it in the generation prompt, rewrite what the policy has read.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product, takewhile
from typing import Any, Literal

from nemo_style_rlhf.data.encoding import Encoder
from nemo_style_rlhf.data.records import Dropped
from nemo_style_rlhf.data.turns import said
from nemo_style_rlhf.schema.chat import Message

Kind = Literal["appends", "rewrites", "refuses"]
_SHOWN = 60
"""Characters of a template's text in a sentence."""
_EXAMPLE_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}},
            "required": ["word"],
        },
    },
}
_QUESTIONS = ("question-1", "question-2", "question-3")
_ANSWERS = ("answer-1", "answer-2")
_THOUGHT = "thought-1"
_LOOKED_FOR = re.compile(r"""(?:split\(\s*(?=['"])|(?=['"][^'"]+['"]\s+(?:not\s+)?in\b))(['"])([^'"\w]+[^'"]*)\1""")
"""A marker, such as ``</think>``, by which an expression of a template splits a text or looks whether it is there."""
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys under which templates expect the reasoning of a message."""


@dataclass(frozen=True)
class Classification:
    """The way in which a chat template treats the past of a conversation."""

    kind: Kind
    """``appends``: every prompt begins with the prompt and the answer before it. ``rewrites``: some prompts do not. ``refuses``:
    the template renders no conversation of several turns, or none with tool results although the run has tools."""
    reason: str
    """One sentence for the user."""
    limits: tuple[str, ...] = ()
    """One sentence about each kind of message that the template cannot render, although a conversation can do without it."""


def classify(encoder: Encoder, tools: list[dict[str, Any]] | None = None) -> Classification:
    """Classify the chat template of ``encoder`` by rendering short conversations.

    Args:
        tools: JSON schemas of the tools of the run; without any, conversations with an example of a tool are tried as well.

    Raises:
        UserError: the tokenizer has no chat template.
    """
    plain = _conversation(_ANSWERS)
    if fault := _fault(encoder, plain, None):
        return Classification("refuses", f"The chat template cannot render a conversation of several turns: {fault}.")
    limits, with_tools = [], _tool_conversation(encoder, tools)
    if isinstance(with_tools, str):
        sentence = f"The chat template cannot render tool results: {with_tools}."
        if tools:
            return Classification("refuses", sentence)
        limits.append(sentence)
    for name, messages in {
        "system messages": [said("system", "system-1"), *plain],
        "two questions in succession": [said("user", "question-0"), *plain],
    }.items():
        if fault := _fault(encoder, messages, None):
            limits.append(f"The chat template cannot render {name}: {fault}.")
    change = next(_changes(encoder, plain, with_tools, tools), None)
    if change:
        return Classification("rewrites", f"The chat template {change}.", tuple(limits))
    spaced = _conversation([f" {answer} " for answer in _ANSWERS])
    exception = ""
    if any(_change(encoder, messages, None, exactly=True) for messages in (plain, spaced)):
        exception = ", except that it changes the white space around an answer"
    return Classification("appends", f"The chat template appends each turn to those before{exception}.", tuple(limits))


def _changes(
    encoder: Encoder, plain: list[Message], with_tools: list[Message] | str, tools: list[dict[str, Any]] | None
) -> Iterator[str]:
    """Yield how the template rewrites the past of conversations, as predicates of a sentence about it."""
    if change := _change(encoder, plain, None):
        yield change
    fields = [plain[0], {**plain[1], **dict.fromkeys(_REASONING_KEYS, _THOUGHT)}, *plain[2:]]
    if any(_forgets_the_thought(encoder, messages) for messages in (fields, *_with_marked_thoughts(encoder))):
        yield "leaves the reasoning of past answers out of later prompts"
    with_system = [said("system", "system-1"), *plain]
    if not _fault(encoder, with_system, None) and (change := _change(encoder, with_system, None)):
        yield f"{change}, in a conversation with a system message"
    if not isinstance(with_tools, str) and (change := _change(encoder, with_tools, tools or [_EXAMPLE_TOOL])):
        yield f"{change}, in a conversation with tool results"


def _conversation(answers: tuple[str, ...] | list[str]) -> list[Message]:
    first, second, third = (said("user", question) for question in _QUESTIONS)
    return [first, said("assistant", answers[0]), second, said("assistant", answers[1]), third]


def _tool_conversation(encoder: Encoder, tools: list[dict[str, Any]] | None) -> list[Message] | str:
    """A conversation with a tool call and its result, or the reason why the template cannot render one."""
    schema = (tools or [_EXAMPLE_TOOL])[0]
    name = schema.get("function", schema).get("name", "look_up")
    arguments = {"word": "word-1"}
    fault = None
    for form in (arguments, json.dumps(arguments)):  # templates expect one or the other
        call = {"id": "call00001", "type": "function", "function": {"name": name, "arguments": form}}
        result = {"role": "tool", "name": name, "tool_call_id": "call00001", "content": "result-1"}
        turn = [said("user", "question-0"), {**said("assistant", ""), "tool_calls": [call]}, result]
        messages = [*turn, said("assistant", "answer-0"), *_conversation(_ANSWERS)]
        found = _fault(encoder, messages, tools or [_EXAMPLE_TOOL])
        if found is None:
            return messages
        fault = fault or found
    return str(fault)


def _prompts(encoder: Encoder, messages: list[Message], tools: list[dict[str, Any]] | None) -> list[str]:
    """The prompt of every answer, and the one after all ``messages``."""
    ends = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    return [encoder.chat(messages[:end], add_generation_prompt=True, tools=tools) for end in (*ends, len(messages))]


def _fault(encoder: Encoder, messages: list[Message], tools: list[dict[str, Any]] | None) -> str | None:
    """The reason why the template cannot render ``messages`` turn by turn; None if it can."""
    try:
        last = _prompts(encoder, messages, tools)[-1]
    except Dropped as reason:
        return str(reason)
    missing = [message["content"] for message in messages if message["content"].strip() not in last]
    return f"it leaves out {missing[0]!r}, what a message of the role 'assistant' says" if missing else None


def _change(
    encoder: Encoder, messages: list[Message], tools: list[dict[str, Any]] | None, *, exactly: bool = False
) -> str | None:
    """Find how the template rewrites the past of ``messages``: a predicate, or None if it only appends.

    Args:
        exactly: count white space before an answer as a change too.
    """
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    prompts = _prompts(encoder, messages, tools)
    questions = [message["content"] for message in messages if message["role"] != "assistant"]
    for before, after, answer in zip(prompts, prompts[1:], answers):
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after)))
        if shared < len(before):
            last = max(before.rfind(question) + len(question) for question in questions if question in before)
            if shared < last:
                return f"changes earlier text when a turn is added, {_quoted(before[shared:])} to {_quoted(after[shared:])}"
            begin = max(last, before.rfind("\n", 0, shared) + 1)
            becomes = _quoted(after[begin:].partition(answer.strip())[0])
            return f"ends a prompt with {_quoted(before[begin:])}, which becomes {becomes} once the answer is there"
        added = after[len(before) :]
        if not (added if exactly else added.lstrip()).startswith(answer):
            return (
                f"writes {_quoted(added.partition(answer.strip())[0])} before an answer, which the prompt for it lacks"
            )
    return None


def _with_marked_thoughts(encoder: Encoder) -> Iterator[list[Message]]:
    """Conversations whose answers begin with reasoning, between any two of the markers that the template looks for in texts."""
    template = encoder.chat_template or encoder.tokenizer.chat_template
    sources = template.values() if isinstance(template, dict) else [template]
    found = {match[1] for source in sources for match in _LOOKED_FOR.findall(source)}
    for opening, closing in product(("", *sorted(found)), sorted(found)):
        yield _conversation([f"{opening}\n{_THOUGHT}\n{closing}\n\n{answer}" for answer in _ANSWERS])


def _forgets_the_thought(encoder: Encoder, messages: list[Message]) -> bool:
    """True if the template writes the reasoning of the first answer at the end of a conversation, but not in a later prompt."""
    try:
        known = _THOUGHT in messages[1]["content"] + encoder.chat(messages[:2], add_generation_prompt=False)
        return known and any(_THOUGHT not in prompt for prompt in _prompts(encoder, messages, None)[1:])
    except Dropped:  # the template knows no reasoning in messages
        return False


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
