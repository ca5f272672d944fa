"""Finds the score head in a checkpoint. Published reward models give it many names, and some configs a wrong size.

In a folder with safetensors, it is found without torch and transformers.
"""

import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from nemo_style_rlhf.errors import UserError

if TYPE_CHECKING:
    import torch

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
"""Names of heads that read each token's last hidden state, as transformers, OpenRLHF, TRL and others write them."""
SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
WEIGHT_FILES = (SAFE, f"{SAFE}.index.json", PICKLED, f"{PICKLED}.index.json")
"""Files of weights, in transformers' order of preference."""
HEAD_FILES = ("value_head.safetensors", "value_head.bin")
"""Files in which LLaMA-Factory keeps the head, next to the weights of a language model."""
STATISTICS = ("mean", "std")
"""Weights in which OpenRLHF kept the statistics that normalize rewards."""
GATING = r"gating\..*|reward_transform_matrix"
"""Weights of the network by which ArmoRM mixes its objectives."""


@dataclass(frozen=True)
class StoredHead:
    """A score head, as the checkpoint's weights have it."""

    name: str
    labels: int
    has_bias: bool
    has_statistics: bool
    """True if :data:`STATISTICS` are among the weights."""
    apart: bool
    """True if it has a file of its own, unknown to transformers' loader."""

    def beside(self, *, mixed: bool) -> re.Pattern[str]:
        """Names of weights that the model's class may leave out: statistics and a bias (read separately), and with
        label_weights (``mixed``) the network that they replace."""
        bias = rf"({re.escape(self.name)}|score)\.bias" if self.has_bias else None
        return re.compile(rf"^({'|'.join(filter(None, [*STATISTICS, bias, GATING if mixed else None]))})$")

    @property
    def key_mapping(self) -> dict[str, str] | None:
        """Renaming for transformers' loader: it knows the head as `score`."""
        return None if self.name == "score" else {rf"^{re.escape(self.name)}\.": "score."}


def head_of_layers(path: str) -> list[str]:
    """Weights below the name of a head that is not a single linear layer."""
    first = {name.partition(".")[0] for name in HEADS}
    return sorted(name for name in StoredWeights(path).names if name.partition(".")[0] in first)[:2]


def is_pickled(path: str) -> bool:
    """True if only torch can read the weights in a folder."""
    found = [name for name in WEIGHT_FILES if (Path(path) / name).is_file()]
    return bool(found) and found[0].startswith(PICKLED)


class StoredWeights:
    """Names and tensors of a checkpoint's files, read without loading the model."""

    def __init__(self, path: str) -> None:
        """``path`` is a folder or a hub name."""
        self._path = path
        self._files: dict[str, str] = {}
        """File name by tensor; empty for a folder without weights, which the loader refuses."""
        for name in WEIGHT_FILES:
            if (file := self._found(name)) is not None:
                with _readable(file):
                    whole = name in (SAFE, PICKLED)
                    index = None if whole else json.loads(Path(file).read_bytes())["weight_map"]
                    self._files = dict.fromkeys(_names(file), name) if index is None else index
                break
        for name in HEAD_FILES:
            if (file := self._found(name)) is not None:
                with _readable(file):
                    self._files |= dict.fromkeys(_names(file), name)
                break

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def is_apart(self, name: str) -> bool:
        """True if a weight is in one of :data:`HEAD_FILES`."""
        return self._files[name] in HEAD_FILES

    def tensor(self, name: str) -> "torch.Tensor":
        """Read the tensor ``name``.

        Raises:
            UserError: a file is missing that the index of the checkpoint names, or cannot be read.
        """
        with _readable(file := self._file(name)):
            if file.endswith(".safetensors"):
                with safe_open(file, framework="pt") as tensors:
                    return tensors.get_tensor(name)  # type: ignore[no-any-return]
            return _unpickled(file)[name]

    def rows(self, name: str) -> int:
        """Size of the first dimension of a tensor. Raises as :meth:`tensor`."""
        with _readable(file := self._file(name)):
            if file.endswith(".safetensors"):
                with safe_open(file, framework="np") as tensors:
                    return int(tensors.get_slice(name).get_shape()[0])
        return int(self.tensor(name).shape[0])

    def _file(self, name: str) -> str:
        if (file := self._found(self._files[name])) is None:
            raise UserError(f"{self._path} lacks the file {self._files[name]} that its index names: download it again")
        return file

    def _found(self, name: str) -> str | None:
        if (folder := Path(self._path)).is_dir():
            return str(folder / name) if (folder / name).is_file() else None
        from transformers.utils import cached_file

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
    labels = weights.rows(f"{name}.weight")
    return StoredHead(
        name, labels, f"{name}.bias" in weights.names, weights.names.issuperset(STATISTICS),
        apart=weights.is_apart(f"{name}.weight"),
    )  # fmt: skip


@contextmanager
def _readable(file: str) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, UnpicklingError, RuntimeError, ValueError, KeyError, EOFError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{file} holds no weights ({reason:.100}): download it again, with git-lfs if it came by git"
        ) from error


def _names(file: str) -> list[str]:
    if file.endswith(".safetensors"):
        with safe_open(file, framework="np") as tensors:
            return list(tensors.keys())
    return list(_unpickled(file))


def _unpickled(file: str) -> "Mapping[str, torch.Tensor]":
    import torch

    weights: Mapping[str, torch.Tensor] = torch.load(
        file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
    )
    return weights
