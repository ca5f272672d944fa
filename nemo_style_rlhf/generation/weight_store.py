"""Published weights: each version is a folder of its own, complete in itself, that engines read whenever they start.

A version holds its tensors as safetensors files and a manifest that appears last, by rename. In /dev/shm it costs no disk.
"""

import base64
import json
import os
import shutil
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save_file
from torch import Tensor

from nemo_style_rlhf.checkpoint.files import storage_errors
from nemo_style_rlhf.errors import StorageError
from nemo_style_rlhf.generation.interface import ProbeTarget, TransferError, WeightUpdate
from nemo_style_rlhf.generation.transfer import OwnWeights

MANIFEST = "manifest.json"


class WeightStore:
    """Versions of a run's weights in a folder that only its user can open. Safe to use from several threads."""

    def __init__(self, root: Path) -> None:
        """Take over ``root``; versions that a killed trainer left there are removed."""
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(mode=0o700, parents=True)
        self.root = root
        self._pinned: Counter[int] = Counter()
        self._lock = threading.Lock()

    def publish(self, update: WeightUpdate) -> "PublishedWeights":
        """Write a version, whole or not at all.

        Raises:
            StorageError: the disk or memory refused.
        """
        try:
            for _ in self.written(update).buckets():
                pass
        except StorageError:
            if isinstance(update, OwnWeights):
                update.skip_rest()
            raise
        return PublishedWeights.open(self._folder(update.version))

    def written(self, update: WeightUpdate) -> WeightUpdate:
        """``update``, written to the store as it is read."""
        return _Written(update, self._folder(update.version))

    def keep(self, versions: Collection[int]) -> None:
        """Remove all versions but these and the pinned ones."""
        with self._lock:
            for folder in self.root.iterdir():
                if int(folder.name) not in versions and not self._pinned[int(folder.name)]:
                    shutil.rmtree(folder)

    def pinned(self, version: int) -> "PublishedWeights":
        """A version, kept until :meth:`unpin` is called as often as this."""
        with self._lock:
            self._pinned[version] += 1
        return PublishedWeights.open(self._folder(version))

    def unpin(self, version: int) -> None:
        with self._lock:
            self._pinned[version] -= 1

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def _folder(self, version: int) -> Path:
        return self.root / str(version)


class _Written:
    """A :class:`WeightUpdate` that writes itself into a folder as it is read."""

    def __init__(self, update: WeightUpdate, folder: Path) -> None:
        self._update, self._folder = update, folder
        self.version, self.probe, self.digest = update.version, update.probe, update.digest

    def buckets(self) -> Iterator[list[tuple[str, Tensor]]]:
        folder, names = self._folder, []
        folder.mkdir(mode=0o700)
        for number, bucket in enumerate(self._update.buckets()):
            names.append([name for name, _ in bucket])
            with storage_errors(folder):
                path = folder / part_name(number)
                save_file(_separate(bucket), path)
                os.chmod(path, 0o600)
            yield bucket
        self.digest = self._update.digest
        manifest = {
            "version": self.version,
            "digest": self.digest,
            "tensors": names,
            "probe": {
                "sequences": self.probe.sequences,
                "logprobs": [base64.b64encode(each.numpy().tobytes()).decode() for each in self.probe.logprobs],
                "max_gap": self.probe.max_gap,
            },
        }
        unfinished = folder / f"{MANIFEST}.tmp"
        with storage_errors(folder):
            unfinished.touch(mode=0o600)
            unfinished.write_text(json.dumps(manifest))
            unfinished.rename(folder / MANIFEST)


@dataclass
class WholeVersion(ABC):
    """A :class:`WeightUpdate` from the files of a version, wherever they are."""

    version: int
    digest: str
    probe: ProbeTarget
    tensors: tuple[tuple[str, ...], ...]
    """Names in the order in which the sender read them, by file."""

    def buckets(self) -> Iterator[list[tuple[str, Tensor]]]:
        for number, names in enumerate(self.tensors):
            try:
                loaded = self._read(part_name(number))
                yield [(name, loaded[name]) for name in names]
            except (OSError, SafetensorError, KeyError) as error:
                raise TransferError(f"weights version {self.version} is incomplete or damaged: {error}") from error

    @abstractmethod
    def _read(self, name: str) -> dict[str, Tensor]:
        """The tensors of a file."""


@dataclass
class PublishedWeights(WholeVersion):
    """The files are in a folder."""

    folder: Path

    @staticmethod
    def open(folder: Path) -> "PublishedWeights":
        """Read the manifest of a version.

        Raises:
            TransferError: the folder holds no whole version.
        """
        try:
            return PublishedWeights(*_fields((folder / MANIFEST).read_bytes()), folder)
        except (OSError, ValueError, TransferError) as error:
            raise TransferError(f"{folder} holds no whole version of the weights ({error})") from error

    @property
    def files(self) -> list[Path]:
        """All files, the manifest last."""
        return [self.folder / name for name in [*map(part_name, range(len(self.tensors))), MANIFEST]]

    def _read(self, name: str) -> dict[str, Tensor]:
        return load_file(self.folder / name)


@dataclass
class SentWeights(WholeVersion):
    """The files are in memory, each until it is read."""

    files: dict[str, bytearray]

    @staticmethod
    def of(files: dict[str, bytearray]) -> "SentWeights":
        """A version from its files, by name; takes the manifest out of them.

        Raises:
            TransferError: the manifest is missing or damaged.
        """
        return SentWeights(*_fields(bytes(files.pop(MANIFEST, b""))), files)

    def _read(self, name: str) -> dict[str, Tensor]:
        return load(bytes(self.files.pop(name)))


def _fields(manifest: bytes) -> tuple[int, str, ProbeTarget, tuple[tuple[str, ...], ...]]:
    """The fields of a :class:`WholeVersion`."""
    try:
        content = json.loads(manifest)
        described = content["probe"]
        logprobs = [
            torch.frombuffer(bytearray(base64.b64decode(each)), dtype=torch.float32) for each in described["logprobs"]
        ]
        probe = ProbeTarget(tuple(map(tuple, described["sequences"])), tuple(logprobs), described["max_gap"])
        names = tuple(map(tuple, content["tensors"]))
        version, digest = content["version"], content["digest"]
        if type(version) is not int or type(digest) is not str:
            raise ValueError(f"version {version!r} with digest {digest!r}")
        return version, digest, probe, names
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TransferError(f"{MANIFEST} describes no version of the weights ({error})") from error


def _separate(bucket: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of a bucket on the CPU, contiguous; safetensors refuses tensors that share memory, as tied weights do, so the
    second of two is copied.
    """
    tensors: dict[str, Tensor] = {}
    addresses = set()
    for name, tensor in bucket:
        tensors[name] = tensor.detach().cpu().contiguous()
        if tensors[name].data_ptr() in addresses:
            tensors[name] = tensors[name].clone()
        addresses.add(tensors[name].data_ptr())
    return tensors


def part_name(number: int) -> str:
    """File name of a version's part."""
    return f"part_{number:05d}.safetensors"
