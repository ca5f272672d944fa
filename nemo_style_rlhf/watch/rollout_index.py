"""An index in memory of a run's samples: every column that is one number or word, none of the texts and lists."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb

from nemo_style_rlhf.watch.rollout_files import (
    READ,
    RolloutFile,
    escaped,
    file_columns,
    list_files,
    open_database,
    quoted,
)

THREADS = 2
MEMORY = "3GB"
BATCH = 8
"""Number of files read at a time: a page shows the files that are read, while others are being read."""
COLUMNS = {
    "step": "INTEGER",
    "row": "INTEGER",
    "prompt_id": "BIGINT",
    "index": "INTEGER",
    "finish_reason": "VARCHAR",
    "failed": "BOOLEAN",
    "reward": "FLOAT",
    "response_tokens": "INTEGER",
    "kl_mean": "FLOAT",
    "kl_max": "FLOAT",
    "file": "INTEGER",
}
"""Columns that views ask for, also of a run that has recorded nothing yet. Files add theirs."""
FIRST_FILES_S = 5.0
"""Longest wait for the first files: without them a page has nothing to show."""
SHORT_TEXT = "finish_reason"
UNREADABLE = (duckdb.Error,)
"""Errors of damaged files, whatever they hold, and of links to files elsewhere."""


class RolloutIndex:
    """Follows the files of a run: new ones are read in a thread, newest first, and what vanished is dropped."""

    def __init__(self, folder: Path) -> None:
        """Follow the files in ``folder``, the run's ``rollouts``; it need not exist yet."""
        self.folder = folder.resolve()
        self._database = open_database(self.folder, threads=THREADS, memory=MEMORY)
        self._database.execute(f"CREATE TABLE samples ({', '.join(f'{quoted(k)} {v}' for k, v in COLUMNS.items())})")
        self._lock = threading.Lock()
        self._files: dict[RolloutFile, int] = {}
        self._numbers = 0
        self.changes = time.monotonic_ns()
        """Grows when samples come or go; no two indexes of a run begin with the same."""
        self._listed = 0
        self._damaged: set[RolloutFile] = set()
        self._reader: threading.Thread | None = None
        self._error: BaseException | None = None
        self._some = threading.Event()

    def refresh(self, patience_s: float) -> tuple[int, int]:
        """Look for new files, and wait up to ``patience_s`` seconds for them.

        Returns:
            Numbers of files that are read, and that exist; damaged ones in neither.
        """
        with self._lock:
            reader = self._reader
            if reader is None or not reader.is_alive():
                reader = self._reader = threading.Thread(target=self._follow, daemon=True)
                reader.start()
        reader.join(patience_s)
        self._some.wait(FIRST_FILES_S)
        with self._lock:
            error, self._error = self._error, None
            if error is not None:
                raise error
            return len(self._files), max(self._listed - len(self._damaged), len(self._files))

    @property
    def damaged(self) -> int:
        """Number of files that cannot be read."""
        return len(self._damaged)

    @contextmanager
    def cursor(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A cursor for one query at a time, alongside other threads' cursors."""
        with self._lock:
            cursor = self._database.cursor()
        with cursor:
            yield cursor

    def columns(self) -> dict[str, str]:
        """Types by name, without the number of the file."""
        with self.cursor() as cursor:
            described = cursor.execute("DESCRIBE samples").fetchall()
        return {name: kind for name, kind, *_ in described if name != "file"}

    def paths(self, numbers: set[int]) -> list[str]:
        """Paths of files by the column ``file``."""
        with self._lock:
            return [file.path for file, number in self._files.items() if number in numbers]

    def _follow(self) -> None:
        try:
            self._read_new_files()
        except BaseException as error:  # noqa: BLE001 - raised again where somebody asks
            self._error = error
        finally:
            self._some.set()

    def _read_new_files(self) -> None:
        listed = list_files(self.folder)
        self._listed = len(listed)
        self._damaged &= set(listed)
        new = [file for file in listed if file not in self._files and file not in self._damaged]
        for first in range(0, len(new), BATCH):
            batch = new[first : first + BATCH]
            try:
                self._take(batch, set(listed))
            except UNREADABLE:
                for file in batch:
                    self._take_one(file, set(listed))
        with self._database.cursor() as cursor:
            for file in set(self._files) - set(listed):
                self._drop(cursor, [file])

    def _take_one(self, file: RolloutFile, listed: set[RolloutFile]) -> None:
        try:
            self._take([file], listed)
        except UNREADABLE:
            if Path(file.path).exists():  # else it was merged or removed: the next look finds what replaced it
                self._damaged.add(file)

    def _take(self, batch: list[RolloutFile], listed: set[RolloutFile]) -> None:
        """Add the samples of files and drop the samples of the files that they replace, in one transaction."""
        replaced = [old for old in self._files if old not in listed and any(_overlap(old, file) for file in batch)]
        paths = [file.path for file in batch]
        with self._database.cursor() as cursor:
            kinds = file_columns(cursor, paths)
            wanted = {name: kind for name, kind in kinds.items() if name == SHORT_TEXT or _is_plain(kind)}
            cursor.execute("BEGIN")
            for name, kind in wanted.items():
                cursor.execute(f"ALTER TABLE samples ADD COLUMN IF NOT EXISTS {quoted(name)} {kind}")
            names = ", ".join(quoted(name) for name in wanted)
            cursor.execute(
                f"INSERT INTO samples BY NAME SELECT {names}, CAST(? + list_position(?, filename) AS INTEGER) AS file "
                f"FROM {READ}",
                [self._numbers, paths, escaped(paths)],
            )
            self._drop(cursor, replaced)
            cursor.execute("COMMIT")
        with self._lock:
            self._files |= {file: self._numbers + place for place, file in enumerate(batch, start=1)}
            self._numbers += len(batch)
            self.changes += 1
        self._some.set()

    def _drop(self, cursor: duckdb.DuckDBPyConnection, files: list[RolloutFile]) -> None:
        for file in files:
            cursor.execute("DELETE FROM samples WHERE file = ?", [self._files[file]])
            with self._lock:
                self.changes += 1
                del self._files[file]


def _overlap(one: RolloutFile, other: RolloutFile) -> bool:
    return one.first <= other.last and other.first <= one.last


def _is_plain(kind: str) -> bool:
    return not kind.endswith("[]") and not kind.startswith(("STRUCT", "MAP", "VARCHAR", "BLOB"))
