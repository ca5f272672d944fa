"""A handler may be interrupted by itself: Linux sends a child's SIGTERM once for each thread of a parent that is killed."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import ROOT

LOCK = {
    "set", "clear", "acquire", "release", "wait", "notify", "notify_all", "get", "submit", "write", "flush",
    "debug", "info", "warning", "error", "exception", "critical", "log",
}  # fmt: skip
"""Methods of events, conditions, locks, queues, files and loggers that take a lock, which the handler below would wait for."""


def handlers(tree: ast.Module) -> Iterator[ast.AST]:
    """The functions that the file gives to ``signal.signal``, as far as it defines them."""
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "signal.signal":
            given = node.args[1]
            name = given.attr if isinstance(given, ast.Attribute) else getattr(given, "id", "")
            found = given if isinstance(given, ast.Lambda) else functions.get(name)
            if found is not None:
                yield found


def locks(handler: ast.AST) -> list[str]:
    """The calls of a handler that may wait for a lock."""
    calls = [node for node in ast.walk(handler) if isinstance(node, ast.Call)]
    found = [ast.unparse(call) for call in calls if getattr(call.func, "attr", None) in LOCK]
    found += [ast.unparse(call) for call in calls if getattr(call.func, "id", None) == "print"]
    return found + ["with" for node in ast.walk(handler) if isinstance(node, ast.With)]


def test_no_handler_takes_a_lock() -> None:
    files: list[Path] = sorted((ROOT / "nemo_style_rlhf").rglob("*.py"))
    found = [(path.name, handler) for path in files for handler in handlers(ast.parse(path.read_text()))]
    assert len(found) >= 4
    assert {name: taken for name, handler in found if (taken := locks(handler))} == {}


def test_one_that_would_is_found() -> None:
    program = "signal.signal(15, lambda *_: told.set())\ndef said(*_):\n    log.info('told')\nsignal.signal(15, said)"
    assert [locks(handler) for handler in handlers(ast.parse(program))] == [["told.set()"], ["log.info('told')"]]
