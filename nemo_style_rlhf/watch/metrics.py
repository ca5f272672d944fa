"""Reads metrics.jsonl and events.jsonl while a run writes them: only what is new, and all after a resume has rewound them."""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from nemo_style_rlhf.tracking.metrics import TIME
from nemo_style_rlhf.watch.run_files import opened

AT_ONCE = 64 * 2**20
"""Bytes of a file that are read at a time."""
LARGEST = 2**53
"""Whole numbers from here on are damage: a browser cannot tell them apart."""
MOST_POINTS = 2000
"""Maximum number of points of a metric in one answer; a chart has fewer pixels."""
SEEN_BYTES = 256
"""Bytes before the place of reading that tell whether the file is still the one that was read."""

Row = dict[str, Any]
Points = tuple[list[int], list[float | None]]
"""Steps, and a metric's values at them."""


@dataclass(frozen=True)
class Cursor:
    """A reader's position in a file: ``rows`` of its life number ``life``."""

    life: int = 0
    rows: int = 0

    def __str__(self) -> str:
        return f"{self.life}.{self.rows}"

    @classmethod
    def parse(cls, text: str) -> "Cursor":
        """Parse a cursor's text; raises ValueError."""
        life, _, rows = text.partition(".")
        return cls(int(life), max(int(rows), 0))


class Log:
    """The lines of a file that grows by lines of JSON with a step. Safe for threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.damage = ""
        """The reason why an existing file cannot be read; empty if it can."""
        self._lock = threading.Lock()
        self._life = time.monotonic_ns()
        self._forget()

    def _forget(self) -> None:
        self._rows: list[Row] = []
        self._offset = 0
        self._seen = b""

    def rows(self) -> list[Row]:
        """All lines, in order. Damaged ones are left out, and the last one while it is cut short."""
        return self.since(Cursor())[0]

    def since(self, cursor: Cursor) -> tuple[list[Row], Cursor]:
        """The lines after ``cursor``, or all if the file has been rewound since, and where they end."""
        with self._lock:
            self._read()
            known = cursor.rows if cursor.life == self._life else 0
            return self._rows[known:], Cursor(self._life, len(self._rows))

    def _read(self) -> None:
        self.damage = ""
        try:
            with opened(self._path, self._path.parent) as file:
                while self._read_new(file):
                    pass
        except OSError as error:  # not there, or not ours to read
            self.damage = "" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
            if self._rows:
                self._begin_again()

    def _read_new(self, file: int) -> bool:
        """True if there were new lines."""
        before = len(self._seen)
        content = os.pread(file, before + AT_ONCE, self._offset - before)
        if content[:before] != self._seen:
            self._begin_again()
            before, content = 0, os.pread(file, AT_ONCE, 0)
        end = content.rfind(b"\n") + 1
        if end <= before:
            return False
        self._rows += filter(None, map(_parsed, content[before:end].split(b"\n")))
        self._offset += end - before
        self._seen = content[max(end - SEEN_BYTES, 0) : end]
        return True

    def _begin_again(self) -> None:
        self._life += 1
        self._forget()


def _parsed(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int or abs(row["step"]) >= LARGEST:
        return None
    if not isinstance(row.get(TIME, 0.0), int | float):
        del row[TIME]
    return {
        sys.intern(key): value for key, value in row.items() if _is_plain(value)
    }  # otherwise each row has its own names


def _is_plain(value: object) -> bool:
    """True if a value is text or a number that the page can calculate with."""
    return isinstance(value, str | float) or (isinstance(value, int) and abs(value) < LARGEST)


class Logs:
    """The logs of all runs, each opened once."""

    def __init__(self) -> None:
        self._logs: dict[Path, Log] = {}

    def __call__(self, path: Path) -> Log:
        return self._logs.setdefault(path, Log(path))


def by_metric(rows: Sequence[Row], *, most: int = MOST_POINTS) -> dict[str, Points]:
    """The points of each metric, from the values that are numbers. A metric's later value of a step replaces an earlier one."""
    found: dict[str, dict[int, float | None]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                found.setdefault(name, {})[row["step"]] = float(value) if abs(value) < float("inf") else None
    return {name: thinned(points, most) for name, points in found.items()}


def thinned(points: Mapping[int, float | None], most: int) -> Points:
    """At most about ``most`` points, by step: of each stretch the lowest and the highest, so that no spike is lost."""
    steps = sorted(points)
    if len(steps) > most:
        values = np.array([points[step] for step in steps], dtype=float)  # None becomes NaN
        steps = [steps[place] for place in _extremes(values, max(most // 2, 1))]
    return steps, [points[step] for step in steps]


def _extremes(values: "np.ndarray[Any, Any]", stretches: int) -> Iterator[int]:
    """Places of the lowest and the highest of each stretch of ``values`` [n], ascending; one place of a stretch of NaN."""
    bounds = [number * len(values) // stretches for number in range(stretches + 1)]
    lows, highs = np.nan_to_num(values, nan=np.inf), np.nan_to_num(values, nan=-np.inf)
    for start, end in pairwise(bounds):
        yield from sorted({start + int(lows[start:end].argmin()), start + int(highs[start:end].argmax())})
