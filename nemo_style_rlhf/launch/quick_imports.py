"""Makes the imports of other libraries do the same in less time. Standard library only.

transformers reads the code of all of its models twice, line by line, to find their names; and of every installed package it
parses the metadata and the list of files, to find which packages bring which modules. torchmetrics, a dependency of Lightning,
loads matplotlib for plots that this package never makes. accelerate loads DeepSpeed to see that a model is not one of its own.
Together that was a quarter of the processor time of a short supervised stage. Read in transformers 5.19, torchmetrics 1.9 and
accelerate 1.15; a version that has nothing of this is left unchanged.
"""

import functools
import importlib.metadata
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

PLAIN = importlib.metadata.packages_distributions
NAME = re.compile(r"^Name: *(\S+)", re.MULTILINE)


def make_imports_quick() -> None:
    """Call this before the libraries are imported; again, it does nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if (quickly := QUICK.get(fullname)) is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(quickly, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _transformers(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    importlib.metadata.packages_distributions = packages_distributions
    try:
        execute(module)
    finally:
        importlib.metadata.packages_distributions = PLAIN
    if fetch := getattr(module, "fetch__all__", None):
        module.fetch__all__ = lambda content: fetch(content[content.rfind("\n__all__") + 1 :])  # type: ignore[attr-defined]
    if read := getattr(module, "create_import_structure_from_path", None):
        module.create_import_structure_from_path = _once_per_folder(read)  # type: ignore[attr-defined]


def _torchmetrics(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    execute(module)
    module._MATPLOTLIB_AVAILABLE = False  # type: ignore[attr-defined]


def _accelerate(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    execute(module)
    module.is_deepspeed_available = lambda: "deepspeed" in sys.modules  # type: ignore[attr-defined]


QUICK = {
    "transformers.utils.import_utils": _transformers,
    "torchmetrics.utilities.imports": _torchmetrics,
    "accelerate.utils.other": _accelerate,
}
"""The function that executes a module's code, by the module's name."""


def _once_per_folder(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Make ``read``, called with a folder or a file in it, read each folder once."""
    cached = functools.cache(read)
    return lambda path: cached(os.path.dirname(path) if os.path.isfile(path) else os.fspath(path))


def packages_distributions() -> dict[str, list[str]]:
    """Return the same as the function of this name in ``importlib.metadata``."""
    found: dict[str, list[str]] = defaultdict(list)
    for distribution in importlib.metadata.distributions():
        record = distribution.read_text("RECORD")
        name = NAME.search(distribution.read_text("METADATA") or "")
        declared = (distribution.read_text("top_level.txt") or "").split()
        if name is None or (record is None and not declared):
            return dict(PLAIN())  # a kind of package that is not known here
        for package in declared or _first_parts(record or ""):
            found[package].append(name[1])
    return dict(found)


def _first_parts(record: str) -> set[str]:
    """Names of the modules at the top, from a list of files."""
    paths = (line.partition(",")[0] for line in record.splitlines())
    return {path.partition("/")[0].removesuffix(".py") for path in paths if path.endswith(".py")}
