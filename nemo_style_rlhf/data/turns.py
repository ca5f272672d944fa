"""Turns of a conversation, in the layouts in which they are published, as messages for a chat template."""

import json
from dataclasses import replace
from typing import Any

from nemo_style_rlhf.data.records import Dropped, Record
from nemo_style_rlhf.schema.chat import Message, is_parts

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation", "environment")
"""Roles that a turn of a conversation may have."""
BEFORE_THE_USER = ("system", "developer")
OF_AN_ANSWER = ("assistant", *ROLES[4:])
"""Roles of the turns of which an answer consists: the assistant's, and the tools' between them."""
SPEAKERS = {
    "system": ("system",),
    "user": ("human", "user"),
    "assistant": ("gpt", "chatgpt", "assistant", "model", "bot", "bard", "bing", "function_call", "tool_call"),
    "tool": ("tool", "tool_response", "function_response", "function", "observation"),
}
"""Names that ShareGPT's `from` has for each role."""
_ROLE_OF = {speaker: role for role, speakers in SPEAKERS.items() for speaker in speakers}
CONVERSATION_COLUMNS = ("messages", "conversations", "conversation")
"""Columns of conversations where no setting names one."""
TOOLS_KEY = "tools"
"""Key, in a row with messages, of the tools that the conversation may call, for the chat template."""


def is_conversation(value: Any) -> bool:
    """True if ``value`` holds turns rather than text."""
    return isinstance(value, list | dict)


def unpacked(record: Record, *keys: str) -> Record:
    """``record``, with conversations in place of the JSON text as which some tables store them under ``keys``."""
    found = {key: turns for key in keys if (turns := _packed(record.fields.get(key))) is not None}
    return replace(record, fields={**record.fields, **found}) if found else record


def _packed(value: Any) -> list[dict[str, Any]] | None:
    """The turns that a text holds as JSON; None if it is another text."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return None
    try:
        turns = json.loads(value)
    except (ValueError, RecursionError):
        return None
    whole = turns and all(
        isinstance(turn, dict) and (turn.keys() >= {"role", "content"} or turn.keys() >= {"from", "value"})
        for turn in turns
    )
    return turns if whole else None


def said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def messages(record: Record, key: str, setting: str) -> list[Message]:
    """The conversation under ``key``: turns of `role` and `content` or of ShareGPT's `from` and `value`, a single such turn, or
    lists of roles and contents, as which some data sets store their turns.

    Raises:
        Dropped: it is not a conversation, or a turn has no text or an unknown speaker.
    """
    value = record.get(key, setting)
    turns = _rows_of(value) if isinstance(value, dict) else value
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        reason = f"whose {key!r} is null" if value is None else f"whose {key!r} is not a list of messages"
        raise Dropped(reason, f"{record.where}: {key!r} is not a list of messages: check the file or {setting}")
    return [_message(turn, record, key) for turn in turns]


def _rows_of(columns: dict[str, Any]) -> list[dict[str, Any]]:
    """The turns of a dict of lists; a dict of values is one turn."""
    lists = {name: values for name, values in columns.items() if isinstance(values, list)}
    if not lists.keys() & {"role", "from"}:
        return [columns]
    lengths = {len(values) for values in lists.values()}
    if len(lengths) != 1:
        raise Dropped("with unequal numbers of roles and contents")
    return [{name: values[turn] for name, values in lists.items()} for turn in range(*lengths)]


def _message(turn: dict[str, Any], record: Record, key: str) -> Message:
    given = without_nulls(turn, arguments=record.filled)
    if turn.get("tool_calls"):
        given.setdefault("content", turn.get("content"))
    else:
        given.pop("tool_calls", None)  # an empty list says that there are none
    if "role" not in given and "from" in given:
        speaker = given.pop("from")
        given = {"role": _ROLE_OF.get(str(speaker).strip().lower()), **given}
        if given["role"] is None:
            raise Dropped(
                f"with a turn from {speaker!r}",
                f"{record.where}: {key!r} has a turn from {speaker!r}, expected one of {', '.join(_ROLE_OF)}: rename it",
            )
    if "role" not in given:
        there = ", ".join(given) or "none"
        raise Dropped(
            "with a turn without a role",
            f"{record.where}: a turn of {key!r} has the keys {there}, expected role and content, or from and value: rename them",
        )
    if given.get("content") is None and "value" in given:
        given["content"] = given.pop("value")
    if given.get("content") is None and given.get("tool_calls"):
        return given
    if not (isinstance(given.get("content"), str) or is_parts(given.get("content"))):
        raise Dropped("with a turn that is not text")
    return given


def without_nulls(value: Any, *, arguments: bool) -> Any:
    """``value`` without the keys, at any depth, whose value is null: tables fill keys that other rows have with nulls, and some
    templates take these for values.

    Args:
        arguments: True removes keys from the arguments of a call too, where a null may be intended.
    """
    if isinstance(value, dict):
        return {
            name: inner if name == "arguments" and not arguments else without_nulls(inner, arguments=arguments)
            for name, inner in value.items()
            if inner is not None
        }
    return [without_nulls(inner, arguments=arguments) for inner in value] if isinstance(value, list) else value


def greeting(turns: list[Message]) -> int:
    """Number of the turns that come before a question: system turns, and what the assistant says unasked."""
    roles = (*BEFORE_THE_USER, "assistant")
    return next((number for number, turn in enumerate(turns) if turn["role"] not in roles), len(turns))


def require_question(turns: list[Message]) -> None:
    """Check that an answer at the end of ``turns`` answers something.

    Raises:
        Dropped: nothing but system turns and a greeting precedes it.
    """
    if greeting(turns) == len(turns) and turns[-1]["role"] == "assistant":
        raise Dropped("without a turn before the answer")


def require_known_speaker(turns: list[Message], record: Record, key: str) -> None:
    """Check that the last turn is known to be an answer or not.

    Raises:
        Dropped: the role of the last turn does not say whether it is an answer.
    """
    if (role := turns[-1].get("role")) not in ROLES:
        raise Dropped(
            f"with the role {role!r} in the last turn",
            f"{record.where}: the last of {key!r} has the role {role!r}, expected one of {', '.join(ROLES)}: rename "
            "the keys and roles of its turns, or an answer would be read as a part of the prompt",
        )


def without_last_answer(turns: list[Message]) -> list[Message]:
    """``turns`` without the answer at their end; all of them if they do not end with an answer.

    An answer consists of the assistant's last turns and the tools' turns between them.

    Raises:
        Dropped: only system turns precede the answer.
    """
    end = len(turns)
    if turns[-1].get("role") == "assistant":
        while end and turns[end - 1].get("role") in OF_AN_ANSWER:
            end -= 1
        if all(turn.get("role") in BEFORE_THE_USER for turn in turns[:end]):
            raise Dropped("without a turn before the answer")
    return turns[:end]


def tools(record: Record) -> list[dict[str, Any]] | None:
    """The row's tools as JSON schemas; data sets often store them as a JSON text.

    Raises:
        Dropped: they are not a list of objects.
    """
    given, filled = record.fields.get(TOOLS_KEY), record.filled
    if isinstance(given, str):
        filled = False
        try:
            given = json.loads(given) if given.strip() else None
        except json.JSONDecodeError as error:
            raise Dropped(f"whose {TOOLS_KEY!r} is not JSON") from error
    if not given:
        return None
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise Dropped(f"whose {TOOLS_KEY!r} is not a list of objects")
    return [without_nulls(tool, arguments=True) for tool in given] if filled else given
