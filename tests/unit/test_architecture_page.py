"""The map in docs/architecture.md has the rooms that the imports show, and the files that pages for developers name exist."""

import re
from pathlib import Path

import pytest

from tests import rooms
from tests.support.paths import ROOT
from tests.unit.test_architecture import PACKAGE, UNIT

PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md", ROOT / "docs" / "developing.md"]
NAME = re.compile(r"`(\.?[\w*][\w./*-]*(?:/|\.(?:py|md|sh|yaml|toml|svg|txt)))`")
"""A file's name with one of these endings, or a folder's with a slash."""


def test_the_rooms_of_the_page_are_those_of_the_imports():
    assert rooms.PAGE.read_text() == rooms.updated(), "run .venv-actor/bin/python -m tests.rooms"
    assert "| ? |" not in rooms.table(), "say in docs/architecture.md what the new room holds"


def names_of(page: Path) -> list[str]:
    return NAME.findall(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_that_a_page_names_exist(page):
    names = names_of(page)
    assert len(names) > 2
    folders = [ROOT, PACKAGE, UNIT.parent / "integration"]
    assert [name for name in names if not any(any(folder.glob(name)) for folder in folders)] == []


def test_the_diagram_names_what_the_page_does():
    drawing = (ROOT / "docs" / "images" / "architecture.svg").read_text()
    named = re.findall(r'class="quiet code"[^>]*>([\w./]+/[\w./]*)', drawing)
    assert len(named) > 4
    assert [name for name in named if not (ROOT / name).exists() and not (PACKAGE / name).exists()] == []
    waits = re.findall(r'class="number"[^>]*>(\d)<', drawing)
    assert sorted(waits) == re.findall(r"^\| (\d) \|", rooms.PAGE.read_text(), re.MULTILINE)
