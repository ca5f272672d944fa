"""Code of a reward function's worker processes; it imports no torch, so that they start fast and stay small."""

import asyncio
import contextlib
import functools
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch.children import end_with_parent

MODULE = "reward_function"


def prepare(path: str, name: str) -> None:
    """Import the function's file in a new worker, before the time limit starts; have the worker end with the trainer."""
    end_with_parent()
    with contextlib.suppress(UserError):  # the call fails in the same way, and reports it
        load_function(path, name)


def call(path: str, name: str, given: dict[str, list[Any]]) -> tuple[Any, str | None]:
    """The function's answer as plain lists, numbers and strings, and None; or None and a sentence about its exception.

    The function's exceptions and objects stay here: another process may be unable to unpickle them.
    """
    try:
        answer = load_function(path, name)(**given)
        if inspect.isawaitable(answer):
            answer = asyncio.run(_awaited(answer))
        return _plain(answer), None
    except BaseException as error:  # noqa: BLE001 sys.exit() would end the pool
        return None, _sentence(error, path)


@functools.cache
def load_function(path: str, name: str) -> Any:
    """The function ``name`` of the file ``path``.

    Raises:
        UserError: the file has no such function, or cannot be imported.
    """
    if not Path(path).is_file():
        raise UserError(f"there is no file {path}: reward.function.path must name the reward function's Python file")
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=SourceFileLoader(MODULE, path))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module  # dataclasses look up their module
    try:
        spec.loader.exec_module(module)
    except UserError:
        raise  # a sentence about this machine, not about the file
    except (Exception, SystemExit) as error:
        raise UserError(
            f"the file of the reward function cannot be imported: {_sentence(error, path)}: correct {path}, "
            "or set reward.function.path to another file"
        ) from error
    if not callable(function := getattr(module, name, None)):
        raise UserError(f"{path} has no function {name}: set reward.function.name to the one it has")
    return function


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _plain(value: Any) -> Any:
    """Convert tensors and arrays to lists, keep numbers, texts and None, and convert anything else to a number or text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return float(value) if hasattr(value, "__float__") else repr(value)


def _sentence(error: BaseException, path: str) -> str:
    """Type, first line, and position in the user's file."""
    said = str(error).strip().splitlines()
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if isinstance(error, SyntaxError) and error.filename == path:
        said, lines = [error.msg], [error.lineno]
    where = f" (line {lines[-1]})" if lines else ""
    return type(error).__name__ + (f": {said[0]}" if said else "") + where
