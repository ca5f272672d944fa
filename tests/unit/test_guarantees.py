"""`make test` shows every guarantee of docs/guarantees.md: each row names a test that is left to neither `make test-more` nor
`make soak`."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT

ROWS = [
    line
    for line in (ROOT / "docs" / "guarantees.md").read_text().splitlines()
    if line.startswith("|") and "tests/" in line
]


def is_left_out(node: ast.AST) -> bool:
    return ast.unparse(node) in ("pytest.mark.more", "pytest.mark.soak")


def in_make_test(path: Path) -> set[str]:
    """Names of the file's tests that `make test` runs, with some of their parameters at least."""
    body = ast.parse(path.read_text()).body
    if any(isinstance(node, ast.Assign) and ast.unparse(node) == "pytestmark = pytest.mark.more" for node in body):
        return set()
    return {
        node.name
        for node in body
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and not any(map(is_left_out, node.decorator_list))
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:60])
def test_a_guarantee_is_shown_by_make_test(row: str) -> None:
    named = set(re.findall(r"`(test_\w+)`", row))
    found = {path: in_make_test(ROOT / path) for path in re.findall(r"`(tests/[\w/]+\.py)`", row)}
    assert any(tests & named if named else tests for tests in found.values()), found


def test_the_page_has_as_many_rows_as_it_has_guarantees() -> None:
    assert len(ROWS) > 35
