"""Checks an environment's answers. Runs in the worker, where the environment is known. Imports no torch."""

import json
import math
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

from nemo_style_rlhf.agents.environment import Observation
from nemo_style_rlhf.agents.wire import LONGEST_LINE
from nemo_style_rlhf.schema.chat import is_message

_SHOWN = 60
"""Maximum characters of a wrong value in an error."""
_LARGEST_TOKEN = 2**31


class WrongAnswer(Exception):
    """An environment's answer is not a valid observation. The message is a predicate: "answered with ..., expected ..."."""

    method: str | None = None
    """Name of the environment's method that returned it."""


def checked(answer: Any) -> Observation:
    """``answer`` with plain numbers, lists and dicts in its fields.

    Raises:
        WrongAnswer: it is not an :class:`Observation`, or one of its fields is invalid.
    """
    if not isinstance(answer, Observation):
        raise WrongAnswer(f"answered with {_shown(answer)}, expected an Observation")
    plain = Observation(
        messages=_messages(answer.messages),
        reward=_number("reward", answer.reward),
        done=_flag(answer.done),
        score=None if answer.score is None else _number("score", answer.score),
        sampling=_sampling(answer.sampling),
        metrics=_metrics(answer.metrics),
    )
    _require_json(plain)
    return plain


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 the user's __repr__
        text = f"a {type(value).__name__} whose __repr__ raised {type(error).__name__}"
    text = " ".join(text.split()).encode(errors="backslashreplace").decode()
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _wrong(field: str, value: Any, expected: str) -> WrongAnswer:
    return WrongAnswer(f"answered with {field}={_shown(value)}, expected {expected}")


def _number(field: str, value: Any) -> float:
    """NumPy numbers and tensors of one number are accepted, too."""
    expected = "a finite number"
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise _wrong(field, value, expected)
    try:
        number = float(value)
    except Exception as error:
        raise _wrong(field, value, expected) from error
    if not math.isfinite(number):
        raise _wrong(field, value, expected)
    return number


def _flag(value: Any) -> bool:
    flag = value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0 else value
    if not isinstance(flag, bool):
        raise _wrong("done", value, "True or False")
    return flag


def _messages(value: Any) -> list[dict[str, Any]] | str | list[int]:
    expected = "a list of messages, a text, or a list of token ids"
    if isinstance(value, str):
        return value
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (bytes, bytearray, Mapping)) or not isinstance(value, Sequence):
        raise _wrong("messages", value, expected)
    if all(isinstance(each, Mapping) for each in value):
        messages = [dict(each) for each in value]
        for message in messages:
            if not is_message(message):
                raise _wrong("messages", message, "messages with a role, and a content that is text or parts of text")
        return messages
    try:
        tokens = [index(each) for each in value if not isinstance(each, bool)]
    except TypeError as error:
        raise _wrong("messages", value, expected) from error
    if len(tokens) < len(value) or not all(0 <= token < _LARGEST_TOKEN for token in tokens):
        raise _wrong("messages", value, expected)
    return tokens


def _sampling(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or value.keys() - {"max_length", "stop"}:
        raise _wrong("sampling", value, "a dict with the keys max_length and stop at most")
    plain: dict[str, Any] = {}
    if "max_length" in value:
        length = value["max_length"]
        if isinstance(length, bool) or not hasattr(length, "__index__") or index(length) <= 0:
            raise _wrong("sampling['max_length']", length, "a number of tokens above 0")
        plain["max_length"] = index(length)
    if "stop" in value:
        stop = value["stop"]
        texts = isinstance(stop, (list, tuple)) and all(isinstance(each, str) and each for each in stop)
        if not texts:
            raise _wrong("sampling['stop']", stop, "a list of texts that are not empty")
        plain["stop"] = list(stop)
    return plain


def _metrics(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise _wrong("metrics", value, "a dict of numbers by name")
    return {name: _number(f"metrics[{name!r}]", number) for name, number in value.items()}


def _require_json(plain: Observation) -> None:
    """Raise :class:`WrongAnswer` if JSON in UTF-8 cannot express the messages or names, or if they are too long."""
    try:
        whole = json.dumps([plain.messages, plain.sampling, plain.metrics], allow_nan=False, ensure_ascii=False)
        size = len(whole.encode())
    except (TypeError, ValueError, RecursionError) as error:
        said = str(error).splitlines()[0]
        raise WrongAnswer(
            f"answered with messages={_shown(plain.messages)}, which JSON cannot express ({said}), expected texts and numbers"
        ) from error
    if size > LONGEST_LINE:
        raise WrongAnswer(f"answered with {size} bytes, expected at most {LONGEST_LINE}")
