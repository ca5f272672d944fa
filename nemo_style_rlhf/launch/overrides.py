"""Overrides of keys on a command line, in Hydra's grammar: https://hydra.cc/docs/advanced/override_grammar/basic"""

import os
import re
import shlex

from nemo_style_rlhf.errors import UserError

_OVERRIDE = re.compile(r"~|\+*\w[\w./@:-]*=")
_PLAIN = re.compile(
    r"(?!(null|true|false|nan|inf|on|off|yes|no)$)(\.{0,2}/|[a-z_])[\w/.@+-]*|[a-z]+:[\w/.@+-]+",
    re.IGNORECASE | re.ASCII,
)
"""Texts that the grammar reads as they stand."""


def is_override(word: str) -> bool:
    return _OVERRIDE.match(word) is not None


def override(key: str, text: object) -> str:
    """The override that sets ``key`` to ``text``, whatever its characters."""
    return f"{key}={quoted(str(text))}"


def quoted(text: str) -> str:
    """``text`` as a value, in quotes where it needs them."""
    if _PLAIN.fullmatch(text):
        return text
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # no interpolation
    text = re.sub(r'(\\*)("|\Z)', lambda end: 2 * end[1] + ('\\"' if end[2] else ""), text)
    return f'"{text}"'


def readable(word: str, *, sweeps: bool) -> str:
    """``word`` as the user meant it: where its value is a path that exists and the grammar would read something else, in quotes.

    Args:
        sweeps: whether commas separate the values of a sweep.

    Raises:
        UserError: the grammar cannot read ``word``; the sentence shows it in quotes.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser  # launchers load no library
    from hydra.errors import HydraException

    key, _, text = word.partition("=")
    whole = override(key, text)
    try:
        parsed = OverridesParser.create().parse_override(word)
    except HydraException:
        parsed = None
    if parsed is not None and (sweeps or not parsed.is_sweep_override()):
        is_text = isinstance(value := parsed.value(), str | int | float)
        differs = value != text or "${" in text
        return whole if is_text and differs and os.path.exists(text) else word
    if os.path.exists(text):
        return whole
    raise UserError(
        f"{word} cannot be read: if its value is one text, write {shlex.quote(whole)}; several values are a list, [A,B], or a "
        "sweep, -m, with quotes around each text that holds more than letters, digits and /._-"
    )
