"""Published weights: each version is a folder of its own, complete in itself, that engines read whenever they start.

A version holds its tensors as safetensors files and a manifest that appears last, by rename. In /dev/shm it costs no disk.
"""

import base64
import json
import os
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_style_rlhf.generation.interface import ProbeTarget, TransferError, WeightUpdate

MANIFEST = "manifest.json"


class WeightStore:
    """Versions of a run's weights in a folder that only its user can open."""

    def __init__(self, root: Path) -> None:
        """Take over ``root``; versions that a killed trainer left there are removed."""
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(mode=0o700, parents=True)
        self.root = root

    def publish(self, update: WeightUpdate) -> Path:
        """Write a version, whole or not at all; returns its folder."""
        folder = self.root / str(update.version)
        folder.mkdir(mode=0o700)
        names: list[list[str]] = []
        for number, bucket in enumerate(update.buckets()):
            names.append([name for name, _ in bucket])
            # Copies, because safetensors refuses tensors that share memory, as tied weights do.
            save_file({name: _copy(tensor) for name, tensor in bucket}, _part(folder, number))
            os.chmod(_part(folder, number), 0o600)
        probe = update.probe
        manifest = {
            "version": update.version,
            "digest": update.digest,
            "tensors": names,
            "probe": {
                "sequences": probe.sequences,
                "logprobs": [base64.b64encode(each.numpy().tobytes()).decode() for each in probe.logprobs],
                "max_gap": probe.max_gap,
            },
        }
        unfinished = folder / f"{MANIFEST}.tmp"
        unfinished.touch(mode=0o600)
        unfinished.write_text(json.dumps(manifest))
        unfinished.rename(folder / MANIFEST)
        return folder

    def keep(self, versions: Collection[int]) -> None:
        """Remove all other versions."""
        for folder in self.root.iterdir():
            if int(folder.name) not in versions:
                shutil.rmtree(folder)

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


@dataclass
class StoredWeights:
    """A :class:`WeightUpdate` from the folder of a version."""

    folder: Path
    version: int
    digest: str
    probe: ProbeTarget
    tensors: tuple[tuple[str, ...], ...]
    """Names in the order in which the sender read them, by file."""

    @staticmethod
    def open(folder: Path) -> "StoredWeights":
        """
        Raises:
            TransferError: the folder holds no whole version.
        """
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            described = manifest["probe"]
            logprobs = [
                torch.frombuffer(bytearray(base64.b64decode(each)), dtype=torch.float32)
                for each in described["logprobs"]
            ]
            probe = ProbeTarget(tuple(map(tuple, described["sequences"])), tuple(logprobs), described["max_gap"])
            names = tuple(map(tuple, manifest["tensors"]))
            version, digest = manifest["version"], manifest["digest"]
            if type(version) is not int or type(digest) is not str:
                raise ValueError(f"version {version!r} with digest {digest!r}")
            return StoredWeights(folder, version, digest, probe, names)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise TransferError(f"{folder} holds no whole version of the weights ({error})") from error

    def buckets(self) -> Iterator[list[tuple[str, Tensor]]]:
        for number, names in enumerate(self.tensors):
            try:
                loaded = load_file(_part(self.folder, number))
                yield [(name, loaded[name]) for name in names]
            except (OSError, SafetensorError, KeyError) as error:
                raise TransferError(f"weights version {self.version} is incomplete or damaged: {error}") from error


def _copy(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def _part(folder: Path, number: int) -> Path:
    return folder / f"part_{number:05d}.safetensors"
