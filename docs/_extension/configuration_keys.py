"""Fills the page of all keys (reference/keys.rst) from the dataclasses of ``nemo_style_rlhf/schema/`` and the files of ``conf/``.

A key's default is the one that its program composes, presets included, as ``--cfg job`` prints it. Programs that give a key the
same type, default and documentation share an entry.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator

from omegaconf import DictConfig
from sphinx.application import Sphinx
from sphinx.util.typing import stringify_annotation

from nemo_style_rlhf.launch.composition import CONF_DIR, compose
from nemo_style_rlhf.schema.documentation import bounds_of, default, docstrings
from nemo_style_rlhf.schema.pair import PairConfig
from nemo_style_rlhf.schema.programs import PROGRAMS

PAGE = "reference/keys"
REQUIRED = "required"
PAIRS = [program for program, (_, schema) in PROGRAMS.items() if issubclass(schema, PairConfig)]
"""Programs that take the actor's keys, and the server's with ``critic.`` before them; the page lists only keys of their own."""


@dataclasses.dataclass(frozen=True)
class Key:
    """A key as a program documents it."""

    name: str
    type: str
    default: str
    expected: str
    text: str

    @property
    def section(self) -> str:
        """The part of the name before the first dot, empty for a key without one."""
        return self.name.partition(".")[0] if "." in self.name else ""


def keys_of(schema: type, composed: DictConfig, prefix: str = "") -> Iterator[Key]:
    """Every key of ``schema`` with its default in ``composed``, in the order of the dataclasses."""
    for field in dataclasses.fields(schema):
        name = prefix + field.name
        if dataclasses.is_dataclass(field.type):
            yield from keys_of(field.type, composed, f"{name}.")
        else:
            value = default(composed, name)
            yield Key(
                name,
                stringify_annotation(field.type, "smart").replace("~", ""),
                REQUIRED if value is None else f"``{value}``",
                "" if (bounds := bounds_of(schema, field.name)) is None else f" ({_escaped(bounds.expected)})",
                docstrings(schema).get(field.name, ""),
            )


def all_keys() -> dict[Key, list[str]]:
    """The keys of all programs, and the programs that take each."""
    found: dict[Key, list[str]] = {}
    for program, (config_name, schema) in PROGRAMS.items():
        for key in keys_of(schema, compose(config_name)):
            of_actor = any(other.name == key.name and "train_ppo_actor" in takers for other, takers in found.items())
            if program in PAIRS and (of_actor or key.name.startswith("critic.")):
                continue
            found.setdefault(key, []).append(program)
    return found


def rst() -> str:
    """The body of the page."""
    keys = all_keys()
    parts: list[str] = []
    for section in sorted({key.section for key in keys}):
        title = section or "Keys of single programs"
        parts.append(f"{title}\n{'-' * len(title)}\n")
        ordered = sorted((key for key in keys if key.section == section), key=lambda key: key.name.count(".") > 1)
        seen: set[str] = set()
        for key in ordered:
            parts.append(_entry(key, keys[key], repeated=key.name in seen))
            seen.add(key.name)
    return "\n".join(parts)


def _entry(key: Key, programs: list[str], *, repeated: bool) -> str:
    head = [f".. confval:: {key.name}", *(["   :no-index:"] if repeated else [])]
    default = f"default {key.default}" if key.default != REQUIRED else REQUIRED
    body = [*key.text.splitlines(), "", f"``{key.type}``, {default}{key.expected}, in {', '.join(programs)}."]
    return "\n".join([*head, "", *(f"   {line}" for line in body), ""])


def presets() -> str:
    """Describe the presets of a group, ``group=name``, by the comments at the head of their files but for commands."""
    lines = []
    for path in sorted(CONF_DIR.glob("*/*.yaml")):
        head = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
        comment = " ".join(line.removeprefix("#").strip() for line in head if not re.match("#   |# @package", line))
        lines += [f"``{path.parent.name}={path.stem}``", f"   {_escaped(comment)}", ""]
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Plain text for RST."""
    return re.sub(r"([\\*`|_])", r"\\\1", text)


def fill(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put keys and presets in their places on the page."""
    if docname == PAGE:
        source[0] = source[0].replace("@PRESETS@", presets()).replace("@KEYS@", rst())


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", fill)
    return {"parallel_read_safe": True}
