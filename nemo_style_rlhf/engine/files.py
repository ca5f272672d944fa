"""Reads DeepSpeed's checkpoint files as plain data.

DeepSpeed 0.19.8 reads them as pickles that may call any function (``TorchCheckpointEngine.load``). It reads all of them through
``DeepSpeedEngine.checkpoint_engine``; this can be replaced.
"""

from pathlib import Path
from typing import Any

from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine  # type: ignore[import-untyped]
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler  # type: ignore[import-untyped]
from deepspeed.runtime.zero.config import ZeroStageEnum  # type: ignore[import-untyped]
from deepspeed.utils.tensor_fragment import fragment_address  # type: ignore[import-untyped]

from nemo_style_rlhf.checkpoint.data import NOT_DATA, read_data
from nemo_style_rlhf.errors import UserError


def zero_stage(enum: Any, name: Any) -> Any:
    """Replaces ``getattr``: Python 3.11.0 to 3.11.3 (as in Debian 12) pickle a member of an enumeration with it.

    Raises:
        ValueError: the arguments are not a ZeRO stage.
    """
    if enum is not ZeroStageEnum or not isinstance(name, str) or name not in ZeroStageEnum.__members__:
        raise ValueError("a checkpoint asks for an attribute of something else than DeepSpeed's ZeRO stages")
    return ZeroStageEnum[name]


CLASSES = (
    ZeroStageEnum, fragment_address, LossScaler, DynamicLossScaler,
    (zero_stage, "builtins.getattr"), (zero_stage, "__builtin__.getattr"),
)  # fmt: skip
"""Classes of the objects in an optimizer's file, and functions that make them. None has side effects."""


def read(path: Path, *, map_location: Any = "cpu", mmap: bool = False) -> dict[str, Any]:
    """Read one of DeepSpeed's files.

    Raises:
        UserError: see :func:`read_data`.
    """
    content: dict[str, Any] = read_data(path, classes=CLASSES, map_location=map_location, mmap=mmap)
    if not isinstance(content, dict):
        raise UserError(f"{path} {NOT_DATA}: bring the checkpoint back from a copy, or remove it")
    return content


def unreadable_files(directory: Path) -> list[str]:
    """Names of the files below ``directory`` that :func:`read` refuses. This is fast: tensors stay on the disk."""

    def is_unreadable(path: Path) -> bool:
        try:
            read(path, mmap=True)
        except UserError:
            return True
        return False

    return [path.name for path in sorted(directory.rglob("*.pt")) if is_unreadable(path)]


class DataFiles(TorchCheckpointEngine):  # type: ignore[misc]
    """DeepSpeed's own writer, with a reader that does not run code in the files."""

    def load(self, path: str, map_location: Any = None) -> dict[str, Any]:
        return read(Path(path), map_location=map_location)
