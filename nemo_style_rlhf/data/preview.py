"""The first rows of a source, checked by the code that reads all of them, before anything is loaded."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from nemo_style_rlhf.data.encoding import Encoder, TokensNeeded, Untokenized
from nemo_style_rlhf.data.records import Record, usable
from nemo_style_rlhf.data.sources import described, read_head
from nemo_style_rlhf.schema.sources import Sources

Row = TypeVar("Row")
Reader = Callable[[Sequence[Record], Encoder], Callable[[Record], Row]]
"""Given the records of a source, returns a function that makes a row of one of them."""
FIRST_ROWS = 1000


def first_rows(sources: Sources, reader: Reader[Row], encoder: Encoder) -> tuple[list[Row], bool]:
    """The usable rows among the first, and whether the first are all rows; if not, none may be usable.

    Raises:
        UserError: a row cannot be read, or these are all rows and none is usable; see :meth:`DropReport.require_kept`.
    """
    records, whole = read_head(sources, FIRST_ROWS)
    rows, report = usable(records, reader(records, encoder), described(sources))
    if whole:
        report.require_kept()
    return rows, whole


def count_rows(sources: Sources, reader: Reader[Any], *, enough: int = 1) -> int:
    """Number of rows that may be usable, as far as that is known without a tokenizer: among the first rows, or among all if fewer
    than ``enough`` of the first are. Returns ``enough`` if reading all rows would take long.

    Raises:
        UserError: as :func:`first_rows`.
    """
    for count in (max(FIRST_ROWS, enough), None):
        records, whole = read_head(sources, count)
        _, report = usable(records, _up_to_tokens(reader(records, Untokenized())), described(sources))
        if whole:
            report.require_kept()
        if whole or report.kept >= enough:
            return report.kept
    return enough


def _up_to_tokens(read: Callable[[Record], Any]) -> Callable[[Record], None]:
    def look(record: Record) -> None:
        with suppress(TokensNeeded):
            read(record)

    return look
