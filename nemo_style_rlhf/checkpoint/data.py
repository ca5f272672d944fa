"""Reads torch's files as plain data: a pickle may call any function, and other users may write to the folder of these files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nemo_style_rlhf.errors import UserError

NOT_DATA = "is damaged, or holds something else than tensors and plain values, which could be code"


def read_data(path: Path, *, classes: Sequence[Any] = (), map_location: Any = "cpu", mmap: bool = False) -> Any:
    """Read the file that ``torch.save`` wrote to ``path``: tensors, plain values and objects of ``classes``.

    Raises:
        UserError: the file holds anything else; no code in it has run.
    """
    try:
        with torch.serialization.safe_globals(list(classes)):
            return torch.load(path, map_location=map_location, mmap=mmap, weights_only=True)
    except (OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a crafted file may raise anything
        raise UserError(f"{path} {NOT_DATA}: bring the checkpoint back from a copy, or remove it") from error
