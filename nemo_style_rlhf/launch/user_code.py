"""Loads functions and classes from a user's Python file, and words the user's exceptions. It imports no torch."""

import functools
import importlib.util
import sys
import traceback
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from nemo_style_rlhf.errors import UserError


@dataclass(frozen=True)
class UserFile:
    """A kind of file that users write."""

    module: str
    """Name under which the file is imported."""
    section: str
    """Configuration section whose `path` and `name` lead to the object in the file."""
    what: str
    """Owner of the file in sentences, as in: the file of the ..."""
    kind: str
    """Kind of the object in sentences: function or class."""

    @functools.cache  # noqa: B019 there are as many of these as of configuration sections
    def load(self, path: str, name: str) -> Any:
        """The callable ``name`` of the file ``path``. The file is imported once.

        Raises:
            UserError: the file has no such callable, or cannot be imported.
        """
        if not Path(path).is_file():
            raise UserError(f"there is no file {path}: {self.section}.path must name the {self.what}'s Python file")
        spec = importlib.util.spec_from_file_location(self.module, path, loader=SourceFileLoader(self.module, path))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module  # dataclasses look up their module
        try:
            spec.loader.exec_module(module)
        except UserError:
            raise  # a sentence about this machine, not about the file
        except (Exception, SystemExit) as error:
            raise UserError(
                f"the file of the {self.what} cannot be imported: {sentence(error, path)}: correct {path}, "
                f"or set {self.section}.path to another file"
            ) from error
        if not callable(found := getattr(module, name, None)):
            raise UserError(f"{path} has no {self.kind} {name}: set {self.section}.name to the one it has")
        return found


def sentence(error: BaseException, path: str) -> str:
    """Type, first line, and position in the user's file ``path``."""
    said = str(error).strip().splitlines()
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if isinstance(error, SyntaxError) and error.filename == path:
        said, lines = [error.msg], [error.lineno]
    where = f" (line {lines[-1]})" if lines else ""
    return type(error).__name__ + (f": {said[0]}" if said else "") + where
