"""Runs checks that need a tokenizer in a process of their own: transformers imports torch where it finds it, and that takes
longer than the checks."""

import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TypeVar

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch.program import CHECKED
from nemo_style_rlhf.processes.child import end_with_parent

Config = TypeVar("Config")
NEEDED_BY_BOTH = (
    "numpy", "yaml", "filelock", "fsspec", "httpx2", "h11", "jinja2.ext", "jinja2.sandbox", "huggingface_hub.file_download",
    "safetensors", "tokenizers",
)  # fmt: skip
"""Libraries of the checks and of every program: a fork has them already."""
NEEDED_BY_TORCH = ("sympy", "triton", "PIL.Image")
"""Libraries that torch and transformers import, and that import no torch themselves."""


def is_due() -> bool:
    """True if this process checks: it is the first rank, and no launcher has checked."""
    return os.environ.get("RANK", "0") == "0" and CHECKED not in os.environ


def without_torch(check: Callable[[Config], None], config: Config, *, then_torch: bool = False) -> None:
    """Call ``check(config)`` where transformers finds no torch, or here if torch is loaded already.

    A check that fails with any other error than a :class:`UserError` counts as passed: code next to a model may need torch, and
    the program itself soon reports what is wrong.

    Args:
        then_torch: this process imports torch next; meanwhile it loads torch's own imports.

    Raises:
        UserError: raised by the check.
    """
    if "torch" in sys.modules:
        check(config)
        return
    _load(NEEDED_BY_BOTH)
    fork = multiprocessing.get_context("fork")  # the config and all modules are there at once
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_run, args=(check, config, theirs), daemon=True)
    process.start()
    theirs.close()
    if then_torch:
        _load(NEEDED_BY_TORCH)
    try:
        sentence = ours.recv()
    except EOFError:
        sentence = None
    process.join()
    if sentence is not None:
        raise UserError(sentence)


def _load(libraries: Sequence[str]) -> None:
    for library in libraries:
        with suppress(ImportError):
            importlib.import_module(library)


def _run(check: Callable[[Config], None], config: Config, answers: Connection) -> None:
    end_with_parent()
    silence = os.open(os.devnull, os.O_WRONLY)  # warnings come again, from the program itself
    for stream in (1, 2):
        os.dup2(silence, stream)
    sys.modules["torch"] = None  # type: ignore[assignment]  # Python's way to say that there is none
    try:
        check(config)
    except UserError as error:
        answers.send(str(error))
