"""A conversation in the form that chat templates read and that is sent to reward servers."""

import json
from dataclasses import dataclass
from datetime import date
from typing import Any

Message = dict[str, Any]
"""A turn: its role, its content, and perhaps tool calls."""


@dataclass(frozen=True)
class Chat:
    """A conversation that waits for the assistant's turn."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the tools that it may call."""
    today: str | None = None
    """The date, as 2026-11-27, for chat templates that write one; None leaves it to the clock."""

    @property
    def question(self) -> str | None:
        """The user's words if the conversation has nothing else."""
        alone = len(self.messages) == 1 and not self.tools and self.messages[0]["role"] == "user"
        return plain_text(self.messages[0]) if alone else None

    def to_json(self) -> str:
        """The conversation as JSON; a value that JSON has no type for, such as a turn's time, becomes its text."""
        return json.dumps({"messages": self.messages, "tools": self.tools, "today": self.today}, default=str)

    @staticmethod
    def from_json(text: str) -> "Chat":
        """Read a result of :meth:`to_json`; raises ValueError if ``text`` is not one."""
        try:
            given = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError("it is not JSON") from error
        if not isinstance(given, dict) or given.keys() - {"messages", "tools", "today"}:
            raise ValueError("expected an object of messages, tools and today")
        turns, tools, today = given.get("messages"), given.get("tools"), given.get("today")
        if not isinstance(turns, list) or not turns or not all(map(is_message, turns)):
            raise ValueError(
                "messages is not a list of objects with a role, and a content that is text or parts of text"
            )
        if not (tools is None or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools))):
            raise ValueError("tools is not a list of objects")
        if today is not None:
            require_date(today)
        return Chat(turns, tools, today)


def require_date(text: Any) -> None:
    """Raise ValueError unless ``text`` is a date like 2026-11-27."""
    if not isinstance(text, str) or len(text) != 10:
        raise ValueError(f"{text!r} is no date like 2026-11-27")
    date.fromisoformat(text)


def is_message(turn: Any) -> bool:
    """True if ``turn`` has a role, and a content that is text or parts of text, or tool calls instead."""
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        return False
    content = turn.get("content")
    return isinstance(content, str) or is_parts(content) or (content is None and bool(turn.get("tool_calls")))


def with_objects(message: Message) -> Message:
    """``message`` with the arguments of its tool calls converted from JSON text, OpenAI's own format, to the objects that chat
    templates read. Text that is not an object stays as it is."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def with_texts(message: Message) -> Message:
    """``message`` with the arguments of its tool calls as JSON text, as a few chat templates read them."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_text(call) for call in calls]}


def _with_text(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_text(call["function"])}
    given = call.get("arguments")
    return {**call, "arguments": json.dumps(given, ensure_ascii=False)} if isinstance(given, dict) else call


def _with_object(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_object(call["function"])}
    try:
        arguments = json.loads(call["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return call
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call


REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which an answer's reasoning is published."""


def reasoning_of(message: Message) -> str:
    """The assistant's reasoning before its answer, under any of these names; empty if it is not separate from the answer."""
    found = (message.get(name) for name in REASONING if message.get("role") == "assistant")
    return next((text for text in found if isinstance(text, str) and text.strip()), "")


def is_parts(content: Any) -> bool:
    """True if ``content`` is a list of parts of text."""
    return isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    )


def plain_text(message: Message) -> str:
    """The text of a turn, its parts joined; empty for a turn with only tool calls."""
    content = message.get("content")
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""
