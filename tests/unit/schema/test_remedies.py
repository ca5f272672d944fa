"""What an error tells a user to set can be set: each key in it is, in full, one of the program that says it."""

import ast
import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_style_rlhf.launch.composition import CONF_DIR
from nemo_style_rlhf.schema.base import SPEAKER, keys
from nemo_style_rlhf.schema.programs import SCHEMAS
from tests.support.paths import ROOT

PACKAGE = ROOT / "nemo_style_rlhf"
RAISES = {"UserError", "ServerError", "Dropped", "require", "require_choice"}
NOT_OURS = {"pad_token_id", "vocab_size"}
"""Keys of a model's config.json."""
KEY = re.compile(r"(?<![\w.\0{/'=-])([a-z_]+(?:\.[a-z_0-9]+)*)=(?!=)")
"""A key in a sentence; one behind a placeholder has its section there."""


@functools.cache
def known(program: type) -> frozenset[str]:
    """The keys of a program and their sections."""
    parts = [key.split(".") for key in keys(program)]
    return frozenset(".".join(each[:length]) for each in parts for length in range(1, len(each) + 1))


def presets() -> set[str]:
    return {path.name for path in CONF_DIR.iterdir() if path.is_dir()}


def text(node: ast.AST) -> str:
    """A text or f-string, with \\0 for what is filled in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text(part) for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "\0"


def sentences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of the sentences about users' mistakes."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in RAISES:
            for each in call.args:
                yield each.lineno, text(each)


MODULES = sorted(set(PACKAGE.rglob("*.py")) - set((PACKAGE / "watch").rglob("*.py")))
"""The page's words are those of its addresses."""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_named_key_is_a_whole_key_of_a_program(path: Path) -> None:
    every = presets().union(NOT_OURS, *map(known, SCHEMAS.values()))
    named = [(line, key) for line, said in sentences(ast.parse(path.read_text())) for key in KEY.findall(said)]
    assert [(line, key) for line, key in named if key not in every] == []


def sections(program: type) -> Iterator[type]:
    """The dataclasses of which a program's configuration consists, as far as it speaks for them itself."""
    yield program
    for field in dataclasses.fields(program):
        kind = typing.get_type_hints(program)[field.name]
        if dataclasses.is_dataclass(kind) and SPEAKER not in field.metadata:
            yield from sections(kind)


HOLDERS = {
    base
    for program in SCHEMAS.values()
    for part in sections(program)
    for base in part.__mro__
    if dataclasses.is_dataclass(base)
}


@pytest.mark.parametrize("holder", sorted(HOLDERS, key=lambda each: each.__name__), ids=lambda each: each.__name__)
def test_a_section_names_keys_that_all_its_programs_have(holder: type) -> None:
    source = inspect.getsource(holder)
    named = {key for _, said in sentences(ast.parse(source)) for key in KEY.findall(said)} - presets()
    users = [each for each in SCHEMAS.values() if any(issubclass(part, holder) for part in sections(each))]
    assert [(each.__name__, key) for each in users for key in sorted(named) if key not in known(each)] == []
