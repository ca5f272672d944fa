"""The Parquet files of a run's rollouts, and databases that read nothing else."""

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb

from nemo_style_rlhf.tracking.sample_files import sample_files


@dataclass(frozen=True)
class RolloutFile:
    path: str
    first: int
    """First step."""
    last: int
    version: tuple[int, int, int]
    """Inode, size and time of the last change: a resumed run may write a step again."""


def list_files(folder: Path) -> list[RolloutFile]:
    """Files of the rollouts, newest step first; none for a folder that does not exist."""
    found = []
    for file in reversed(sample_files(folder)):
        try:
            status = file.path.stat()
        except FileNotFoundError:  # merged or thinned out meanwhile
            continue
        version = (status.st_ino, status.st_size, status.st_mtime_ns)
        found.append(RolloutFile(str(file.path), file.first, file.last, version))
    return found


READ = "read_parquet(?, union_by_name = true, hive_partitioning = false)"
"""The rows of files, given as :func:`escaped` has them; the column ``filename`` can be selected."""


def escaped(paths: Sequence[str]) -> list[str]:
    """``paths`` as DuckDB takes them: it reads some characters as patterns."""
    return [glob.escape(path) for path in paths]


def open_database(folder: Path, *, threads: int, memory: str) -> duckdb.DuckDBPyConnection:
    """A database in memory that can read files in ``folder`` and nothing else, and fetches no extensions."""
    database = duckdb.connect(
        ":memory:",
        config={
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "threads": threads,
            "memory_limit": memory,
            "temp_directory": "",
        },
    )
    where = str(folder.resolve()) + "/"
    database.execute(f"SET allowed_directories = [{literal(where)}, {literal(glob.escape(where))}]")
    database.execute("SET parquet_metadata_cache = true")
    database.execute("SET enable_external_access = false")
    database.execute("SET lock_configuration = true")
    return database


def literal(text: str) -> str:
    """``text`` as a string literal of SQL, where a statement takes no parameters."""
    return "'" + text.replace("'", "''") + "'"


def quoted(column: str) -> str:
    """A column's name as SQL writes it."""
    return '"' + column.replace('"', '""') + '"'


def file_columns(cursor: duckdb.DuckDBPyConnection, paths: Sequence[str]) -> dict[str, str]:
    """Types of the columns of Parquet files by name."""
    described = cursor.execute(f"DESCRIBE SELECT * FROM {READ}", [escaped(paths)]).fetchall()
    return {row[0]: row[1] for row in described}
