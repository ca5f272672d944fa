"""Overrides of keys on a command line, in Hydra's grammar: https://hydra.cc/docs/advanced/override_grammar/basic"""

import os
import re
import shlex

from nemo_style_rlhf.errors import UserError

_OVERRIDE = re.compile(r"~|\+*\w[\w./@:-]*=")
_PLAIN = re.compile(r"[\w.-]*/[\w./-]*", re.ASCII)
"""Paths that need no quotes."""


def is_override(word: str) -> bool:
    return _OVERRIDE.match(word) is not None


def override(key: str, text: object) -> str:
    """The override that sets ``key`` to ``text``, whatever its characters."""
    value = str(text)
    if _PLAIN.fullmatch(value):
        return f"{key}={value}"
    value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)  # no interpolation
    value = re.sub(r'(\\*)("|\Z)', lambda end: 2 * end[1] + ('\\"' if end[2] else ""), value)
    return f'{key}="{value}"'


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
    quoted = override(key, text)
    try:
        parsed = OverridesParser.create().parse_override(word)
    except HydraException:
        parsed = None
    if parsed is not None and (sweeps or not parsed.is_sweep_override()):
        is_text = isinstance(value := parsed.value(), str | int | float)
        differs = value != text or "${" in text
        return quoted if is_text and differs and os.path.exists(text) else word
    if os.path.exists(text):
        return quoted
    raise UserError(
        f"{word} cannot be read: if its value is one text, write {shlex.quote(quoted)}; several values are a list, [A,B], or a "
        "sweep, -m, with quotes around each text that holds more than letters, digits and /._-"
    )
