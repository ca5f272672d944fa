"""A conversation in the form that chat templates read, and in which it travels to a reward server."""

import json
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
"""A turn: its role, its content, and perhaps tool calls."""


@dataclass(frozen=True)
class Chat:
    """A conversation that waits for the assistant's turn."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the tools that it may call."""

    @property
    def question(self) -> str | None:
        """The user's words if the conversation consists of these alone."""
        alone = len(self.messages) == 1 and not self.tools and self.messages[0]["role"] == "user"
        return plain_text(self.messages[0]) if alone else None

    def to_json(self) -> str:
        """The conversation as JSON; a value that JSON has no type for, such as a turn's time, becomes its text."""
        return json.dumps({"messages": self.messages, "tools": self.tools}, default=str)

    @staticmethod
    def from_json(text: str) -> "Chat":
        """
        Raises:
            ValueError: ``text`` is not the result of :meth:`to_json`.
        """
        try:
            given = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError("it is not JSON") from error
        if not isinstance(given, dict) or given.keys() - {"messages", "tools"}:
            raise ValueError("expected an object of messages and tools")
        turns, tools = given.get("messages"), given.get("tools")
        if not isinstance(turns, list) or not turns or not all(map(is_message, turns)):
            raise ValueError(
                "messages is not a list of objects with a role, and a content that is text or parts of text"
            )
        if not (tools is None or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools))):
            raise ValueError("tools is not a list of objects")
        return Chat(turns, tools)


def is_message(turn: Any) -> bool:
    """Whether ``turn`` has a role, and a content that is text or parts of text, or tool calls instead."""
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        return False
    content = turn.get("content")
    return isinstance(content, str) or is_parts(content) or (content is None and bool(turn.get("tool_calls")))


def is_parts(content: Any) -> bool:
    """Whether ``content`` is a list of parts of text."""
    return isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    )


def plain_text(message: Message) -> str:
    """The text of a turn, its parts joined; empty for a turn of tool calls alone."""
    content = message.get("content")
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""
