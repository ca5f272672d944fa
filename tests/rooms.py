"""Writes the table of rooms in docs/architecture.md from the imports that tests/unit/test_architecture.py allows:

    .venv-actor/bin/python -m tests.rooms

The second column is written by hand and kept.
"""

from functools import cache

from tests.support.pages import table_rows
from tests.support.paths import ROOT
from tests.unit.test_architecture import ALLOWED, OWNERS

PAGE = ROOT / "docs" / "architecture.md"
HEAD = "| room | holds | may import | only it imports |\n|---|---|---|---|\n"


@cache
def level(room: str) -> int:
    """Number of rooms on the longest way down from ``room``, itself included."""
    return 1 + max(map(level, ALLOWED[room]), default=0)


def table() -> str:
    """The table's rows, a room above all rooms that it may import."""
    held = {row[0]: row[1] for row in table_rows(PAGE, "room")}
    rows = ""
    for room in sorted(ALLOWED, key=lambda room: (-level(room), room)):
        libraries = sorted(library for library, owners in OWNERS.items() if owners == {room})
        rows += f"| {room} | {held.get(room, '?')} | {', '.join(sorted(ALLOWED[room]))} | {', '.join(libraries)} |\n"
    return rows


def updated() -> str:
    """The page with the table as it should be."""
    before, head, rest = PAGE.read_text().partition(HEAD)
    return before + head + table() + rest[rest.index("\n\n") + 1 :]


if __name__ == "__main__":
    PAGE.write_text(updated())
