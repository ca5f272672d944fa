"""Explains keys by the docstrings of the schema."""

import ast
import dataclasses
import inspect
import textwrap
from functools import cache
from typing import Any, get_type_hints

from omegaconf import DictConfig, OmegaConf

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.base import BOUNDS, Bounds, keys
from nemo_style_rlhf.schema.renamed import hint


def describe(schema: type, key: str, composed: DictConfig) -> str:
    """The type, the default and the docstring of ``key``, or of every key of a group such as ``engine.optim``.

    Args:
        composed: the program's configuration without overrides, for the defaults.

    Raises:
        UserError: the key does not exist.
    """
    holder: Any = schema
    for part in key.split("."):
        owner, name = holder, part
        if not dataclasses.is_dataclass(owner) or name not in {field.name for field in dataclasses.fields(owner)}:
            renamed = hint(key, list(keys(schema)))
            raise UserError(f"--help {key}: {renamed or 'there is no such key; --help alone lists all of them'}")
        holder = get_type_hints(owner)[name]
    if not dataclasses.is_dataclass(holder):
        return _line(owner, name, key, composed)
    lines = [_line(holder, field.name, f"{key}.{field.name}", composed) for field in dataclasses.fields(holder)]  # type: ignore[arg-type]
    return "\n".join([f"{key}: {inspect.getdoc(holder)}", *lines])


def _line(owner: type, name: str, key: str, composed: DictConfig) -> str:
    kind = get_type_hints(owner)[name]
    if dataclasses.is_dataclass(kind):
        return f"{key}: a group, see --help {key}"
    value = default(composed, key)
    shown = "required" if value is None else f"default {value}"
    kind_name = kind.__name__ if isinstance(kind, type) else str(kind)
    if bounds := bounds_of(owner, name):
        shown += f"; {bounds.expected}"
    text = textwrap.indent(docstrings(owner).get(name, ""), "    ")
    return f"{key} ({kind_name.replace('None', 'null')}, {shown})" + (f"\n{text}" if text else "")


def bounds_of(owner: type, name: str) -> Bounds | None:
    """The values that the key may have, if not every value of its type."""
    (bounds,) = (field.metadata.get(BOUNDS) for field in dataclasses.fields(owner) if field.name == name)
    return bounds


def default(composed: DictConfig, key: str) -> str | None:
    """The default of ``key`` as the command line takes it; None if there is none."""
    parent, _, name = key.rpartition(".")
    section = OmegaConf.select(composed, parent) if parent else composed
    if OmegaConf.is_missing(section, name):
        return None
    value = section[name]
    return _written(OmegaConf.to_container(value) if OmegaConf.is_config(value) else value)


def _written(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    return '""' if value == "" else str(value)


@cache
def docstrings(schema: type) -> dict[str, str]:
    """The text below each field of a dataclass, its bases' included."""
    found: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                found[field.target.id] = inspect.cleandoc(ast.literal_eval(text.value))
    return found
