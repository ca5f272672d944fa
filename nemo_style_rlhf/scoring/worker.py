"""Code of a reward function's worker processes; it imports no torch, so that they start fast and stay small."""

import asyncio
import contextlib
import inspect
from collections.abc import Mapping
from typing import Any

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch.user_code import UserFile, sentence
from nemo_style_rlhf.processes.child import end_with_parent

REWARD_FUNCTION = UserFile("reward_function", "reward.function", "reward function", "function")


def prepare(path: str, name: str) -> None:
    """Import the function's file in a new worker, before the time limit starts. The worker ends with the trainer."""
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
        return None, sentence(error, path)


def load_function(path: str, name: str) -> Any:
    """The function ``name`` of the file ``path``.

    Raises:
        UserError: the file has no such function, or cannot be imported.
    """
    return REWARD_FUNCTION.load(path, name)


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
