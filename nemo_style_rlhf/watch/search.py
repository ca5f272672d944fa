"""Text search over all prompts and responses of a run, step by step, newest first."""

import re
import threading
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

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

THREADS = 1
"""Leaves the other cores to the views."""
MEMORY = "1GB"
AROUND = 80
"""Characters shown on either side of a match."""
STEPS_AT_ONCE = 10
MOST_HITS = 1000
_NOWHERE = cast("re.Match[str]", re.match("", ""))
"""Stands for a match if the database folds case differently from the pattern: the text is shown from its beginning."""
SHOWN = ("reward", "finish_reason", "prompt_id", "index")


class Search:
    """One search; :meth:`messages` may run in a thread, :meth:`stop` comes from another."""

    def __init__(self, folder: Path, text: str, *, most: int = MOST_HITS) -> None:
        """Prepare a search.

        Args:
            folder: the run's ``rollouts``.
            text: literal text to find, upper and lower case alike.
            most: samples after which the search ends.
        """
        self._folder, self._text, self._most = folder, text, most
        self._pattern = re.compile(re.escape(text), re.IGNORECASE)
        self._database = open_database(folder, threads=THREADS, memory=MEMORY)
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()
        with suppress(duckdb.ConnectionException):  # the search has ended
            self._database.interrupt()

    def messages(self) -> Generator[dict[str, Any], None, None]:
        """Hits as they are found, ``{"searched", "of"}`` in steps now and then, and at the end ``{"done", "hits"}``."""
        files = list_files(self._folder)
        of = sum(file.last - file.first + 1 for file in files)
        searched = hits = 0
        try:
            for file, first, last in _spans(files):
                yield {"searched": searched, "of": of}
                for hit in self._in_span(file, first, last):
                    hits += 1
                    yield hit
                    if hits == self._most:
                        yield {"done": True, "hits": hits, "cut": True, "searched": searched, "of": of}
                        return
                searched += last - first + 1
            yield {"done": True, "hits": hits, "cut": False, "searched": searched, "of": of}
        except duckdb.InterruptException:
            if not self._stopped.is_set():
                raise
        finally:
            self._database.close()

    def _in_span(self, file: RolloutFile, first: int, last: int) -> list[dict[str, Any]]:
        self._check()
        try:
            try:
                return self._query([file.path], first, last)
            except duckdb.IOException:  # compacted or thinned out meanwhile
                paths = [each.path for each in list_files(self._folder) if each.first <= last and first <= each.last]
                return self._query(paths, first, last) if paths else []
        except duckdb.InterruptException:
            raise
        except duckdb.Error:  # damaged, or a link to a file elsewhere
            return []

    def _check(self) -> None:
        """End a stopped search: an interrupt has no effect while no query runs."""
        if self._stopped.is_set():
            raise duckdb.InterruptException("stopped")

    def _query(self, paths: list[str], first: int, last: int) -> list[dict[str, Any]]:
        there = file_columns(self._database, paths)
        self._check()
        shown = "".join(f", {quoted(name)}" for name in SHOWN if name in there)
        cursor = self._database.execute(
            f"""SELECT step, row{shown}, prompt, response
            FROM {READ.replace("?", "$paths")}
            WHERE step BETWEEN $first AND $last
            AND (contains(lower(response), lower($text)) OR contains(lower(prompt), lower($text)))
            ORDER BY step DESC, row LIMIT $most""",
            {"text": self._text, "paths": escaped(paths), "first": first, "last": last, "most": self._most},
        )
        names = [column[0] for column in cursor.description or ()]
        return [self._hit(dict(zip(names, row, strict=True))) for row in cursor.fetchall()]

    def _hit(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row with a part of the text around the match in place of the texts."""
        prompt, response = row.pop("prompt"), row.pop("response")
        match = self._pattern.search(response)
        where, text = ("response", response) if match else ("prompt", prompt)
        start, end = (match or self._pattern.search(prompt) or _NOWHERE).span()
        return {
            **row,
            "where": where,
            "before": text[max(0, start - AROUND) : start],
            "match": text[start:end],
            "after": text[end : end + AROUND],
            "cut_before": start > AROUND,
            "cut_after": len(text) > end + AROUND,
        }


def _spans(files: list[RolloutFile]) -> Iterator[tuple[RolloutFile, int, int]]:
    """Parts of files, newest first: a search reports its progress, and stops, between two of them."""
    for file in files:
        for last in range(file.last, file.first - 1, -STEPS_AT_ONCE):
            yield file, max(file.first, last - STEPS_AT_ONCE + 1), last
