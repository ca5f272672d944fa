"""A fault: one line of the repository that is wrong, and the tests that should find it."""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

GUARANTEES = ROOT / "docs" / "guarantees.md"


class Inapplicable(Exception):
    """A fault no longer fits the repository."""


@dataclass(frozen=True)
class Fault:
    name: str
    guarantee: str
    """Beginning of the row in docs/guarantees.md that the fault breaks."""
    file: str
    old: str
    """Text of the file that the fault replaces. It occurs once."""
    new: str
    tests: tuple[str, ...]
    """Node ids of the cheapest tests that find it."""

    def applied(self, root: Path = ROOT) -> str:
        """The file's text with the fault.

        Raises:
            Inapplicable: ``old`` does not occur exactly once.
        """
        text = (root / self.file).read_text()
        if (times := text.count(self.old)) != 1:
            raise Inapplicable(
                f"fault {self.name} no longer applies to {self.file}: {self.old!r} occurs {times} times, expected once"
            )
        return text.replace(self.old, self.new)

    def row(self, rows: list[str]) -> str:
        """Its guarantee.

        Raises:
            Inapplicable: not exactly one of ``rows`` begins with ``guarantee``.
        """
        found = [row for row in rows if row.startswith(self.guarantee)]
        if len(found) != 1:
            raise Inapplicable(
                f"fault {self.name} names the guarantee {self.guarantee!r}, with which {len(found)} rows of "
                f"{GUARANTEES.relative_to(ROOT)} begin, expected one"
            )
        return found[0]


def guarantees() -> list[str]:
    """The first cell of every row in docs/guarantees.md that says what tests hold: claims about GPUs come after them."""
    held = GUARANTEES.read_text().partition("\n## On a GPU")[0]
    cells = re.findall(r"^\| (.+?) \|", held, re.MULTILINE)
    return [cell for cell in cells if cell != "guarantee"]


def text_of(node: str) -> tuple[Path, str]:
    """File and function of a node id."""
    file, _, function = node.partition("::")
    return ROOT / file, function.partition("[")[0]
