"""Reads rows from JSONL files and JSON arrays (plain or gzip), Parquet, and everything that the `datasets` library loads."""

import glob
import gzip
import io
import itertools
import json
import logging
import ssl
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from nemo_style_rlhf.data.records import Record
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.sources import EXPECTED_SOURCE, JSON_SUFFIXES, DataSet, Sources, matching_files, names_of

log = logging.getLogger(__name__)
HUB_TIMEOUT_S = 5.0
PARQUET_ROWS = 1024
LARGE_ARRAY = 32 * 2**20
"""Size in bytes of the largest JSON array that :func:`read_head` reads: arrays are read whole."""
Rows = Iterator[tuple[str, dict[str, Any], bool]]
"""Position and fields of each row, and whether its source is a table."""


def read_records(sources: Sources) -> Iterator[Record]:
    """The rows of ``sources`` in their order, numbered through.

    Args:
        sources: one or several of: a JSON or Parquet file, a pattern of files, a folder written by ``datasets`` or one with data
            files, a hub name; the latter two as ``name``, ``name:split`` or ``name:config:split``.

    Raises:
        UserError: a file or data set does not exist, or a line is not a JSON object; the error names the line.
    """
    return _numbered(_rows(name) for name in names_of(sources))


def read_head(sources: Sources, count: int | None) -> tuple[list[Record], bool]:
    """The first ``count`` rows of ``sources``, or all, and whether these are all rows. The list is empty, and the flag False, for
    sources that take too long to check: data sets that only ``datasets`` reads, and large JSON arrays.

    Raises:
        UserError: as :func:`read_records`, for these rows.
    """
    groups = [[name] if Path(name).is_file() else matching_files(name) for name in names_of(sources)]
    files = [Path(file) for group in groups for file in group]
    if not all(groups) or any(_may_be_array(file) and file.stat().st_size > LARGE_ARRAY for file in files):
        return [], False
    rows = _numbered(_file_rows(file, _parquet_rows) for file in files)
    try:
        head = list(itertools.islice(rows, None if count is None else count + 1))
    except _Unread:
        return [], False
    return head[:count], count is None or len(head) <= count


def _numbered(parts: Iterator[Rows]) -> Iterator[Record]:
    for index, row in enumerate(itertools.chain.from_iterable(parts)):
        yield Record(index, *row)


def described(sources: Sources) -> str:
    """The name of ``sources`` in reports."""
    return ", ".join(names_of(sources))


def _rows(name: str) -> Rows:
    path = Path(name)
    if path.is_file():
        yield from _file_rows(path, _built_rows)
        return
    data_set = DataSet.parse(name)
    if data_set.is_folder or data_set.may_be_on_hub:
        for index, row in enumerate(_data_set(name, data_set)):
            yield f"{name} row {index}", dict(row), True
    elif files := matching_files(name):
        for file in files:
            yield from _file_rows(Path(file), _built_rows)
    else:
        raise UserError(f"{name} does not exist: expected {EXPECTED_SOURCE}")


def _file_rows(path: Path, read_others: Callable[[Path], Iterator[Any]]) -> Rows:
    if path.name.endswith(JSON_SUFFIXES):
        return _json_rows(path)
    return ((f"{path} row {index}", dict(row), True) for index, row in enumerate(read_others(path)))


def _built_rows(path: Path) -> Iterator[Any]:
    return iter(_built(str(path), _load_file, path))


class _Unread(Exception):
    """The file cannot be read here; ``datasets`` tries later and reports the reason."""


def _parquet_rows(path: Path) -> Iterator[Any]:
    import pyarrow.parquet  # a tenth of a second, and `datasets` takes seconds

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=PARQUET_ROWS):
                yield from batch.to_pylist()
    except (OSError, ValueError) as error:
        raise _Unread from error


def _json_rows(path: Path) -> Rows:
    compressed = path.suffix == ".gz"
    try:
        with gzip.open(path) if compressed else path.open("rb") as raw:
            text = io.TextIOWrapper(raw, encoding="utf-8-sig")  # type: ignore[type-var]
            is_array = _may_be_array(path) and _first_character(text) == "["
            yield from _array(text, path) if is_array else _lines(text, path)
    except (gzip.BadGzipFile, zlib.error, EOFError, UnicodeDecodeError) as error:
        kind = "gzip-compressed UTF-8" if compressed else "UTF-8"
        raise UserError(f"{path} cannot be read as {kind} ({error}): write the file again") from error
    except PermissionError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): change its permissions") from error


def _may_be_array(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith(".json")


def _first_character(text: TextIO) -> str:
    """The first character of ``text`` that is not white space."""
    first = next((line.lstrip()[0] for line in text if line.strip()), "")
    text.seek(0)
    return first


def _lines(lines: TextIO, path: Path) -> Rows:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path} line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{where} is not valid JSON ({error.msg} at column {error.colno}): expected one object per line"
                ) from error
            yield where, _object(row, where, "one JSON object per line"), False


def _array(text: TextIO, path: Path) -> Rows:
    try:
        rows = json.load(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path} line {error.lineno} is not valid JSON ({error.msg} at column {error.colno}): expected an array of objects"
        ) from error
    for index, row in enumerate(rows):
        where = f"{path} row {index}"
        yield where, _object(row, where, "an array of JSON objects"), False


def _object(row: Any, where: str, expected: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UserError(f"{where} holds {type(row).__name__}, expected {expected}")
    return row


def _data_set(name: str, data_set: DataSet) -> Any:
    folder = Path(data_set.name)
    if any((folder / file).is_file() for file in ("dataset_info.json", "dataset_dict.json", "state.json")):
        return _built(name, _load_saved, data_set)
    return _built(name, _load_built, data_set)


def _load_file(path: Path) -> Any:
    import datasets

    return datasets.load_dataset(path.suffix.lstrip("."), data_files=glob.escape(str(path)), split="train")


def _load_saved(data_set: DataSet) -> Any:
    """The table that ``save_to_disk`` wrote, or one of its splits."""
    import datasets

    saved = datasets.load_from_disk(data_set.name)
    if data_set.config is not None:
        raise ValueError("it was written by save_to_disk, which knows no configurations")
    if not isinstance(saved, datasets.DatasetDict):
        if data_set.split is not None:
            raise ValueError("it was written by save_to_disk as one table, without splits")
        return saved
    split = data_set.split or "train"
    if split not in saved:
        raise ValueError(f"it has no split {split} but {', '.join(saved)}")
    return saved[split]


def _load_built(data_set: DataSet) -> Any:
    import datasets

    if data_set.is_folder and (glob.has_magic(data_set.name) or "::" in data_set.name):
        raise ValueError(
            "`datasets` takes *, ?, [ and :: in a folder's path for a pattern: rename the folder, or give its files"
        )
    if not data_set.is_folder and not datasets.config.HF_HUB_OFFLINE and not _hub_answers():
        log.warning(
            "%s did not answer within %g s: data sets are read from the local cache and may be older than the hub's",
            datasets.config.HF_ENDPOINT,
            HUB_TIMEOUT_S,
        )
        datasets.config.HF_HUB_OFFLINE = True  # the library would try again for half a minute
    return datasets.load_dataset(data_set.name, data_set.config, split=data_set.split or "train")


def _hub_answers() -> bool:
    import datasets

    try:
        urllib.request.urlopen(datasets.config.HF_ENDPOINT, timeout=HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # the library has its own certificates
    except OSError:
        return False
    return True


def _built(name: str, load: Any, source: Any) -> Any:
    """``load(source)``, with the faults of a user's data set as one sentence."""
    import datasets  # heavy, and most runs read JSON

    try:
        return load(source)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        first, then = [*str(error).splitlines(), "", ""][:2]
        named = then if "available" in then else ""  # the configurations there are
        reason = f"{first or type(error).__name__} {named}".strip().rstrip(".")
        raise UserError(
            f"{name} cannot be loaded as a data set ({reason}): expected {EXPECTED_SOURCE}, as name, name:split or "
            "name:config:split"
        ) from error
