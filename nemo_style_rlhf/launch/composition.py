"""Composes the configuration of a program from ``conf/``, the schema and overrides, with Hydra."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

from nemo_style_rlhf.schema.base import literal
from nemo_style_rlhf.schema.programs import SCHEMAS

PACKAGE = Path(__file__).resolve().parents[1]
CONF_DIR = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"
"""Inside an installed package (package_dir in setup.py), next to the package in the repository."""
FOLLOWS = "${"
"""The beginning of a preset that follows another group's: it is not a choice of its own."""


def store_schemas(name: str) -> None:
    """Store the schemas from which ``conf/<name>.yaml`` and the files that it inherits start, as ``<file>_schema``."""
    for file in inherited(name):
        if file in SCHEMAS:
            ConfigStore.instance().store(name=f"{file}_schema", node=SCHEMAS[file])


def inherited(name: str, section: str = "") -> dict[str, str]:
    """The file ``conf/<name>.yaml`` and those that it inherits, each with the section of the configuration that it fills."""
    found = {name: section}
    for entry in _defaults(name):
        if isinstance(entry, str) and (CONF_DIR / f"{(file := entry.partition('@')[0])}.yaml").exists():
            found |= inherited(file, entry.partition("@")[2])
    return found


@cache
def _defaults(name: str) -> list[Any]:
    """The defaults list of a file, https://hydra.cc/docs/advanced/defaults_list."""
    content = yaml.safe_load((CONF_DIR / f"{name}.yaml").read_text())
    return list(content["defaults"])


def compose(name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """The configuration of ``conf/<name>.yaml`` with ``overrides``, as the program of that file gets it."""
    store_schemas(name)
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        return hydra.compose(name, overrides=[in_section(word, name) for word in overrides])


def presets(name: str) -> dict[str, tuple[str, list[str]]]:
    """The presets that ``conf/<name>.yaml`` takes, including presets of inherited files.

    Returns:
        By the group that users write, such as ``critic.engine``: the group in Hydra's grammar, and the names of its files.
    """
    found: dict[str, tuple[str, list[str]]] = {}
    followers: set[str] = set()
    for file, section in inherited(name).items():
        for entry in _defaults(file):
            if isinstance(entry, str):
                continue
            ((key, preset),) = entry.items()
            group = key.split()[-1].partition("@")[0]
            if str(preset).startswith(FOLLOWS):
                followers.add(group)
            written = f"{section}.{group}" if section else group
            names = sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))
            found[written] = (f"{group}@{written}" if section else group, names)
    return {written: each for written, each in found.items() if written.rpartition(".")[2] not in followers}


def in_section(word: str, name: str) -> str:
    """``word`` in Hydra's grammar: ``engine@critic.engine=zero3`` for ``critic.engine=zero3``."""
    group, equals, preset = word.partition("=")
    is_preset = equals and not preset.startswith("{") and "." in group and group in presets(name)
    return f"{presets(name)[group][0]}={preset}" if is_preset else word


def config_file(base: str, values: Mapping[str, Any]) -> str:
    """A configuration file for the program of ``conf/<base>.yaml``: ``values`` instead of presets.

    The program takes the file as ``--config-dir=FOLDER --config-name=NAME``.
    """
    content = {"defaults": [f"{base}_schema", "_self_"], **literal(values)}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
