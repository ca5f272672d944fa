"""torch.compile, with a cache that the next start finds."""

import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def compile_forward(module: nn.Module) -> None:
    """Make calls of ``module`` compile its forward and backward, for shapes of any size."""
    _keep_results()
    module.compile(dynamic=True)


@cache
def compiled_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled ``function``, the same for each call."""
    _keep_results()
    return torch.compile(function, dynamic=True)


def _keep_results() -> None:
    """Keep torch's compiled code among the user's caches, in a folder for this kind of processor.

    torch's default is the folder for temporary files, and clusters empty that after a job. Code for one processor may not run on
    another that shares the home folder, and torch does not check.
    """
    if FOLDER in os.environ:
        return
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    features = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    folder = caches / "nemo_style_rlhf" / f"compiled-{hashlib.sha256(features.encode()).hexdigest()[:12]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # no home to write to: torch's own choice then
    os.environ[FOLDER] = str(folder)
