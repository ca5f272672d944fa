"""The commands and tables that a page of the documentation shows."""

import re
from pathlib import Path


def blocks(page: Path, language: str) -> list[str]:
    """The page's ```language blocks."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands_of(block: str) -> list[str]:
    """The commands of a block, continuation lines joined."""
    lines = block.replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def commands(page: Path) -> list[str]:
    """The commands of a page's ```bash blocks."""
    return [command for block in blocks(page, "bash") for command in commands_of(block)]


def table_rows(page: Path, first_heading: str) -> list[list[str]]:
    """The cells of the tables whose first column has this heading."""
    rows, reads = list[list[str]](), False
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        if cells and reads and not cells[0].startswith("---"):
            rows.append(cells)
        reads = bool(cells) and (reads or cells[0] == first_heading)
    return rows
