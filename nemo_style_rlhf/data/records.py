"""Rows with their positions, and the report on those that cannot be used."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from nemo_style_rlhf.errors import UserError

Row = TypeVar("Row")
_EXAMPLES_KEPT = 3


class Dropped(Exception):
    """A row is unusable; the message is the reason for the report."""

    def __init__(self, reason: str, sentence: str | None = None, *, advice: str = "check the file") -> None:
        """Drop a row for ``reason``.

        Args:
            sentence: error for the user if every row is dropped for it: the first row's fault, and what to change.
            advice: what to change about rows that are dropped for it.
        """
        super().__init__(reason)
        self.sentence, self.advice = sentence, advice


@dataclass(frozen=True)
class Record:
    """One row with its position, for error messages."""

    index: int
    """0-based row number in its source: the stable identity of the row."""
    where: str
    """Position for error messages, e.g. `train.jsonl line 12`."""
    fields: dict[str, Any]
    filled: bool = False
    """True if its source fills keys that other rows have with nulls, as tables do: a null is then not a value of this row."""

    def has(self, key: str) -> bool:
        """True if there is a value under ``key``: `datasets` fills keys that other rows have with nulls."""
        return self.fields.get(key) is not None

    def column(self, given: str | None, usual: Sequence[str]) -> str:
        """``given`` if it is set; else the first of ``usual`` that has a value here, else the first that is here at all."""
        if given is not None:
            return given
        here = [key for key in usual if key in self.fields]
        return next(filter(self.has, here), [*here, *usual][0])

    def get(self, key: str, setting: str) -> Any:
        """The value of ``key``; ``setting`` is the configuration key that names it.

        Raises:
            Dropped: the row has no such key.
        """
        if key not in self.fields:
            there = ", ".join(self.fields) or "none"
            raise Dropped(
                f"without the key {key!r}",
                f"{self.where} has no key {key!r} (the keys there are: {there}): set {setting} to one of them",
            )
        return self.fields[key]

    def text(self, key: str, setting: str) -> str:
        """Like :meth:`get`, for a value that must be a string."""
        value = self.get(key, setting)
        if not isinstance(value, str):
            raise self.unexpected(key, value, "a string", setting)
        return value

    def unexpected(self, key: str, value: Any, expected: str, setting: str) -> Dropped:
        """The reason to drop a row whose ``value`` under ``key`` is of another type."""
        kind = type(value).__name__
        return Dropped(
            f"whose {key!r} is null" if value is None else f"whose {key!r} holds {kind} instead of {expected}",
            f"{self.where}: {key!r} holds {kind}, expected {expected}: check the file or {setting}",
        )


@dataclass
class DropReport:
    """Counts the kept rows, and by reason the dropped rows, with the first of them."""

    source: str
    kept: int = 0
    cut: int = 0
    """Number of kept prompts that were cut before their last answer."""
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[Record]] = field(default_factory=dict)
    _sentence: str | None = None
    _advice: dict[str, None] = field(default_factory=dict)

    def drop(self, dropped: Dropped, record: Record) -> None:
        """Count ``record`` as dropped."""
        reason = str(dropped)
        if not self.dropped:
            self._sentence = dropped.sentence
        self.dropped[reason] += 1
        self._advice[dropped.advice] = None
        first = self.examples.setdefault(reason, [])
        if len(first) < _EXAMPLES_KEPT:
            first.append(record)

    def require_kept(self) -> None:
        """Check that a row was kept.

        Raises:
            UserError: none was; it says why, and what to change.
        """
        if self.kept == 0 and not self.dropped:
            raise UserError(f"{self.source} is empty: expected at least one row")
        if self.kept == 0:
            if self._sentence is not None and len(self.dropped) == 1:
                raise UserError(self._sentence)
            raise UserError(
                f"{self.source}: all {self.dropped.total()} rows were dropped ({self._reasons()}): {', or '.join(self._advice)}"
            )

    def _reasons(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in self.dropped.most_common())

    def __str__(self) -> str:
        cut = f", {self.cut} of them cut before the answer they end with" if self.cut else ""
        if not self.dropped:
            return f"{self.source}: {self.kept} rows{cut}"
        first = "; ".join(
            f"{reason}: {', '.join(record.where for record in records)}" for reason, records in self.examples.items()
        )
        dropped = f"{self.dropped.total()} dropped ({self._reasons()}; first of them: {first})"
        return f"{self.source}: {self.kept} rows kept{cut}, {dropped}"


def require_whole_characters(value: Any) -> None:
    """Check the texts in ``value``, at any depth.

    Raises:
        Dropped: a text holds half of a surrogate pair, such as a part of an emoji.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise Dropped("with half of a character (a lone surrogate)") from error
    elif isinstance(value, dict):
        for key, inner in value.items():
            require_whole_characters(key)
            require_whole_characters(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            require_whole_characters(inner)


def usable(records: Iterable[Record], read: Callable[[Record], Row], source: str) -> tuple[list[Row], DropReport]:
    """Read the records of ``source`` with ``read``; returns the rows, and a report on the records that it drops."""
    rows, report = [], DropReport(source)
    for record in records:
        try:
            require_whole_characters(record.fields)
            rows.append(read(record))
        except Dropped as reason:
            report.drop(reason, record)
    report.kept = len(rows)
    return rows, report
