"""Names of data sets: a file, a pattern of files, a folder or a hub name, the latter two with a configuration and a split."""

import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_style_rlhf.errors import UserError

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")
FILE_SUFFIXES = (*JSON_SUFFIXES, ".parquet")
EXPECTED_SOURCE = "a .jsonl, .json or .parquet file (the former two also .gz), a pattern of files, or a `datasets` path"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_WITH_CONFIG = re.compile(r"([^:]+):([^:\[\]]+):(.*)")
_WITH_SPLIT = re.compile(r"([^:]+):(.+)")
Sources = str | Sequence[str]
"""One name of a data set, or several, whose rows follow each other."""


@dataclass(frozen=True)
class DataSet:
    """A folder or a hub name, with what is read from it."""

    name: str
    config: str | None = None
    split: str | None = None

    @staticmethod
    def parse(given: str) -> "DataSet":
        """Parse `name`, `name:split` or `name:config:split`; a split may be a slice, `train[:10%]`."""
        if Path(given).exists():
            return DataSet(given)
        if found := _WITH_CONFIG.fullmatch(given):
            return DataSet(found[1], found[2], found[3] or None)
        if found := _WITH_SPLIT.fullmatch(given):
            return DataSet(found[1], split=found[2])
        return DataSet(given)

    @property
    def is_folder(self) -> bool:
        return Path(self.name).is_dir()

    @property
    def may_be_on_hub(self) -> bool:
        return bool(_HUB_NAME.fullmatch(self.name)) and not self.name.endswith(FILE_SUFFIXES)


def matching_files(pattern: str) -> list[str]:
    """The files that ``pattern`` (``*``, ``?``, ``[...]``, ``**``) matches, sorted by name."""
    if not glob.has_magic(pattern):
        return []
    return sorted(path for path in glob.glob(pattern, recursive=True) if Path(path).is_file())


def names_of(sources: Sources) -> list[str]:
    return [sources] if isinstance(sources, str) else list(sources)


def require_sources(key: str, given: Any) -> None:
    """Raise UserError unless ``given`` is a name or a list of names."""
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise UserError(f"{key}={given} is not possible: expected a file, a data set, or a list of them")
