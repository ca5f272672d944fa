"""Digests of what a checkpoint holds: equal exactly where every bit of weights, optimizer state and schedule is."""

import hashlib
from pathlib import Path
from typing import Any

from torch import Tensor

from nemo_style_rlhf.engine.files import read
from nemo_style_rlhf.models.digests import tensor_bytes


def digest_of_files(directory: Path) -> str:
    """Of every file that torch wrote below ``directory``."""
    files = sorted(directory.rglob("*.pt"))
    assert files
    return digest_of_state([read(file) for file in files])


def digest_of_state(state: Any) -> str:
    """Of a nested state dict, in order, tensors by their bits."""
    digest = hashlib.sha256()
    _update(digest, state)
    return digest.hexdigest()


def _update(digest: "hashlib._Hash", node: Any) -> None:
    if isinstance(node, Tensor):
        digest.update(f"{node.dtype} {tuple(node.shape)}".encode())
        digest.update(tensor_bytes(node))
    elif isinstance(node, dict):
        for key, value in node.items():
            digest.update(str(key).encode())
            _update(digest, value)
    elif isinstance(node, (list, tuple)):
        for value in node:
            _update(digest, value)
    elif isinstance(node, (bool, int, float, str, type(None))):
        digest.update(repr(node).encode())
