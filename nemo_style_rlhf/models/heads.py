"""Finds the score head in a checkpoint. Published reward models give it many names, and some configs a wrong size."""

import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)

from nemo_style_rlhf.errors import UserError

HEADS = (
    "score",
    "value_head",
    "v_head.summary",
    "v_head",
    "reward_head",
    "regression_head",
    "regression_layer",
    "rm_head",
)
"""Names of heads that read the last hidden state of each token: of transformers; OpenRLHF; TRL; and others' own classes."""
STATISTICS = ("mean", "std")
"""Weights in which OpenRLHF kept the statistics that normalize rewards."""
BESIDE_HEAD = re.compile(r"^(mean|std)$")
BESIDE_HEADS = re.compile(r"^(mean|std|gating\..*|reward_transform_matrix)$")
"""With label_weights: these take the place of the network by which ArmoRM mixes its objectives."""


@dataclass(frozen=True)
class StoredHead:
    """A score head, as the checkpoint's weights have it."""

    name: str
    labels: int
    has_bias: bool
    has_statistics: bool
    """Whether :data:`STATISTICS` are among the weights."""

    @property
    def key_mapping(self) -> dict[str, str] | None:
        """For transformers' loader, which knows the head as `score`."""
        return None if self.name == "score" else {rf"^{re.escape(self.name)}\.": "score."}


class StoredWeights:
    """Names and tensors of a checkpoint's files, read without loading the model."""

    def __init__(self, path: str) -> None:
        """
        Args:
            path: folder or hub name.
        """
        self._path = path
        self._files: dict[str, str] = {}
        """File name by tensor; empty for a folder without weights, which the loader refuses."""
        for index in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
            if not self._files and (file := self._found(index)) is not None:
                self._files = json.loads(Path(file).read_bytes())["weight_map"]
        for whole in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
            if not self._files and (file := self._found(whole)) is not None:
                self._files = dict.fromkeys(_names(file), whole)

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def tensor(self, name: str) -> torch.Tensor:
        """
        Raises:
            UserError: a file is missing that the index of the checkpoint names.
        """
        if (file := self._found(self._files[name])) is None:
            raise UserError(f"{self._path} lacks the file {self._files[name]} that its index names: download it again")
        if file.endswith(".safetensors"):
            with safe_open(file, framework="pt") as tensors:
                return tensors.get_tensor(name)  # type: ignore[no-any-return]
        return _unpickled(file)[name]

    def _found(self, name: str) -> str | None:
        try:
            return cached_file(self._path, name)  # type: ignore[no-any-return]
        except OSError:
            return None


def stored_head(path: str) -> StoredHead | None:
    """The checkpoint's score head; None if it has none of :data:`HEADS`.

    Raises:
        UserError: it has several.
    """
    weights = StoredWeights(path)
    found = [name for name in HEADS if f"{name}.weight" in weights.names]
    if len(found) > 1:
        raise UserError(
            f"{path} has the heads {' and '.join(found)}, a reward model has one: load and save it as an "
            "AutoModelForSequenceClassification with the head that is meant"
        )
    if not found:
        return None
    (name,) = found
    labels = weights.tensor(f"{name}.weight").shape[0]
    return StoredHead(name, labels, f"{name}.bias" in weights.names, weights.names.issuperset(STATISTICS))


def _names(file: str) -> list[str]:
    if file.endswith(".safetensors"):
        with safe_open(file, framework="pt") as tensors:
            return list(tensors.keys())
    return list(_unpickled(file))


def _unpickled(file: str) -> Mapping[str, torch.Tensor]:
    weights: Mapping[str, torch.Tensor] = torch.load(
        file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
    )
    return weights
