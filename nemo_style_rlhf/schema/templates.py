"""Reads templates that a configuration gives as a text or as the name of a file."""

from pathlib import Path

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser

from nemo_style_rlhf.errors import UserError

PLACEHOLDER = "{prompt}"
FILE_MARK = "@"
JINJA_OPENS = ("{{", "{%", "{#")


class _Generation(Extension):
    """Parses ``{% generation %}``, transformers' tag with which a template marks the assistant's text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def unrendered(template: str | None, text: str) -> str:
    """Recover the prompt from a ``text`` that was rendered with ``template``."""
    if template is None:
        return text
    before, after = template.split(PLACEHOLDER)
    return text[len(before) : len(text) - len(after)]


def prompt_template_text(given: str) -> str:
    """``given``, or for ``@file`` the file's text without its final line break.

    Raises:
        UserError: the file does not exist.
    """
    if not given.startswith(FILE_MARK) or PLACEHOLDER in given:
        return given
    return _read("data.prompt_template", given.removeprefix(FILE_MARK)).removesuffix("\n")


def rubric_text(given: str) -> str:
    """``given``, or for ``@file`` the file's text without its final line break.

    Raises:
        UserError: the file does not exist.
    """
    if not given.startswith(FILE_MARK) or "{response}" in given:
        return given
    return _read("reward.judge.rubric", given.removeprefix(FILE_MARK)).removesuffix("\n")


def chat_template_text(given: str) -> str:
    """``given`` if it is Jinja; else the text of the file that it names, with or without ``@`` before the path.

    Raises:
        UserError: the file does not exist, or is not a Jinja template.
    """
    if _is_jinja(given):
        text, source = given, "data.chat_template"
    elif "\n" in given:
        raise UserError("data.chat_template is a text without {{ }} or {% %}: give a Jinja template, or @file")
    else:
        path = given.removeprefix(FILE_MARK)
        text, source = _read("data.chat_template", path), f"data.chat_template: {path}"
        if not _is_jinja(text):
            raise UserError(f"{source} holds no {{{{ }}}} or {{% %}}: give the file of a Jinja chat template")
    try:
        jinja2.Environment(extensions=[loopcontrols, _Generation]).from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{source} is not Jinja, line {error.lineno}: {error.message}; mend the template") from error
    return text


def _is_jinja(text: str) -> bool:
    return any(mark in text for mark in JINJA_OPENS)


def _read(key: str, path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{key}={path} cannot be read ({error.strerror}): give the path of a file, or the template's text itself"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{key}={path} is not text in UTF-8: give a text file") from error
