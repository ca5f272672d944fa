"""Reads rows from JSONL files (plain or gzip), Parquet, and everything that the `datasets` library loads."""

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.paths import JSONL_SUFFIXES, may_be_hub_data

_EXAMPLES_KEPT = 3


@dataclass(frozen=True)
class Record:
    """One row with its position, for error messages."""

    index: int
    """0-based row number in its source: the stable identity of the row."""
    where: str
    """Position for error messages, e.g. `train.jsonl line 12`."""
    fields: dict[str, Any]

    def get(self, key: str, setting: str) -> Any:
        """The value of ``key``; ``setting`` is the configuration key that names it.

        Raises:
            UserError: the row has no such key.
        """
        if key not in self.fields:
            there = ", ".join(self.fields) or "none"
            raise UserError(
                f"{self.where} has no key {key!r} (the keys there are: {there}): set {setting} to one of them"
            )
        return self.fields[key]

    def text(self, key: str, setting: str) -> str:
        """Like :meth:`get`, for a value that must be a string."""
        value = self.get(key, setting)
        if not isinstance(value, str):
            raise UserError(
                f"{self.where}: {key!r} holds {type(value).__name__}, expected a string: check the file or {setting}"
            )
        return value


class Dropped(Exception):
    """A row is unusable; the message is the reason for the report."""


@dataclass
class DropReport:
    """Counts rows that were kept, and by reason those that were dropped, with the first of them."""

    source: str
    kept: int = 0
    cut: int = 0
    """Number of kept prompts that were cut before their last answer."""
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, reason: str, record: Record) -> None:
        """Count ``record`` as dropped."""
        self.dropped[reason] += 1
        first = self.examples.setdefault(reason, [])
        if len(first) < _EXAMPLES_KEPT:
            first.append(record.where)

    def require_kept(self, advice: str) -> None:
        """
        Raises:
            UserError: no row was kept; ``advice`` says what to change.
        """
        if self.kept == 0 and not self.dropped:
            raise UserError(f"{self.source} is empty: expected at least one row")
        if self.kept == 0:
            raise UserError(
                f"{self.source}: all {self.dropped.total()} rows were dropped ({self._reasons()}): {advice}"
            )

    def _reasons(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in self.dropped.most_common())

    def __str__(self) -> str:
        cut = f", {self.cut} of them cut before the answer they end with" if self.cut else ""
        if not self.dropped:
            return f"{self.source}: {self.kept} rows{cut}"
        first = "; ".join(f"{reason}: {', '.join(places)}" for reason, places in self.examples.items())
        dropped = f"{self.dropped.total()} dropped ({self._reasons()}; first of them: {first})"
        return f"{self.source}: {self.kept} rows kept{cut}, {dropped}"


def read_records(source: str) -> Iterator[Record]:
    """The rows of ``source`` in their order.

    Args:
        source: a .jsonl, .jsonl.gz or .parquet file, a folder written by ``datasets``, or a hub name ``owner/name[:split]``.

    Raises:
        UserError: the file or data set does not exist, or a line, which is named, is not a JSON object.
    """
    path = Path(source)
    if path.is_file() and source.endswith(JSONL_SUFFIXES):
        yield from _read_jsonl(path)
    elif path.exists() or may_be_hub_data(source):
        for index, row in enumerate(_load_with_datasets(source, path)):
            yield Record(index, f"{source} row {index}", dict(row))
    else:
        raise UserError(f"{source} does not exist: expected a .jsonl, .jsonl.gz or .parquet file or a `datasets` path")


def _read_jsonl(path: Path) -> Iterator[Record]:
    index = 0
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    where = f"{path} line {number}"
                    yield Record(index, where, _json_object(line, where))
                    index += 1
        except (gzip.BadGzipFile, EOFError, UnicodeDecodeError) as error:
            kind = "gzip-compressed UTF-8" if path.suffix == ".gz" else "UTF-8"
            raise UserError(f"{path} cannot be read as {kind} ({error}): write the file again") from error


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where} is not valid JSON ({error.msg} at column {error.colno}): expected one object per line"
        ) from error
    if not isinstance(row, dict):
        raise UserError(f"{where} holds {type(row).__name__}, expected one JSON object per line")
    return row


def _load_with_datasets(source: str, path: Path) -> Any:
    import datasets  # heavy, and most runs read JSONL

    try:
        if path.is_file():
            return datasets.load_dataset(path.suffix.lstrip("."), data_files=source, split="train")
        if path.is_dir() and (path / "dataset_info.json").is_file():
            return datasets.load_from_disk(source)
        name, _, split = source.partition(":") if not path.exists() else (source, "", "")
        return datasets.load_dataset(name, split=split or "train")
    except (FileNotFoundError, ValueError, ConnectionError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise UserError(
            f"{source} cannot be loaded as a data set ({reason}): expected a JSONL file or a `datasets` path"
        ) from error
