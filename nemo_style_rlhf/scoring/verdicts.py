"""Reads a judge's verdict out of its answer."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from nemo_style_rlhf.schema.judge import VerdictConfig

NUMBER = r"[-+]?\d+(?:\.\d+)?(?!\w|[.,]\d|[ \t]*[-\u2013][ \t]*\d)"
"""Does not match the beginning of a longer number, such as 1,000 or 1e5, or of a range, such as 1-10."""
RANGE = r"[(\[]\s*\d+\s*(?:[-\u2013/]|to)\s*\d+\s*[)\]]"
DECODER = json.JSONDecoder()


class Unreadable(ValueError):
    """An answer holds no verdict; the message says what was expected."""


def read_verdict(answer: str, config: VerdictConfig) -> float:
    """The reward that ``answer`` gives; finite.

    Raises:
        Unreadable: it gives none.
    """
    if config.kind == "json":
        return _from_json(answer, config)
    if config.kind == "choice":
        choices = config.rewards
        names = "|".join(re.escape(name) for name in sorted(choices, key=len, reverse=True))
        found = _last(config.pattern or _alone_or_named(rf"(?:{names})(?!\w)"), answer)
        if found is None:
            raise Unreadable(f"expected one of {', '.join(choices)}, as reward.judge.verdict.pattern finds it")
        return _reward_of(found, config)
    found = _last(config.pattern or _alone_or_named(NUMBER), answer)
    if found is None:
        raise Unreadable("expected a number, as reward.judge.verdict.pattern finds it")
    return _scaled(found, config)


def _alone_or_named(verdict: str) -> str:
    """A pattern for an answer that is only the verdict, and for a verdict in [[ ]] or after a word that announces it."""
    mark = r"[\s*`\"'(\[]*"
    alone = rf"\A{mark}({verdict})(?:\s*/\s*\d+)?[\s*`\"')\].]*\Z"
    quotes = r"[\s*`\"']*"
    name = rf"\b(?i:score|rating|grade|verdict|choice|winner)\b{quotes}(?:{RANGE}{quotes})?"
    named = rf"{name}(?::|=|(?i:is)\b){mark}({verdict})"
    return rf"{alone}|\[\[({verdict})\]\]|{named}"


def _last(pattern: str, answer: str) -> str | None:
    found = None
    for match in re.finditer(pattern, answer):
        found = next((group for group in match.groups() if group is not None), match.group())
    return found


def _from_json(answer: str, config: VerdictConfig) -> float:
    values = [found[config.json_key] for found in _objects(answer) if config.json_key in found]
    if not values:
        raise Unreadable(f"expected a JSON object with the key {config.json_key}")
    value = values[-1]
    if isinstance(value, str) and value.strip() in config.rewards:
        return _reward_of(value, config)
    if not isinstance(value, str | int | float):
        raise Unreadable(f"expected a number or a choice as {config.json_key} of its JSON object")
    return _scaled(value, config)


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The outermost JSON objects in ``text``, in their order."""
    start = text.find("{")
    while start >= 0:
        try:
            found, end = DECODER.raw_decode(text, start)
            yield found
        except (ValueError, RecursionError):
            end = start + 1
        start = text.find("{", end)


def _reward_of(name: str, config: VerdictConfig) -> float:
    name = name.strip()
    if name not in config.rewards:
        raise Unreadable(f"expected one of {', '.join(config.rewards)}, not {name[:40]!r}")
    return float(config.rewards[name])


def _scaled(value: str | float, config: VerdictConfig) -> float:
    """``value`` as a number, or as its place between ``low`` and ``high``."""
    try:
        number = float(value)
    except (ValueError, OverflowError) as error:
        raise Unreadable(f"expected a number, not {str(value)[:40]!r}") from error
    if not math.isfinite(number):
        raise Unreadable(f"expected a finite number, not {number}")
    if config.low is None or config.high is None:
        return number
    if not config.low <= number <= config.high:
        raise Unreadable(f"expected a number from {config.low:g} to {config.high:g}, not {number:g}")
    return (number - config.low) / (config.high - config.low)
