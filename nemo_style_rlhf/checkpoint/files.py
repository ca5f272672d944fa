"""Durable files: written to a temporary name, flushed to disk, renamed; and digests that prove them undamaged."""

import hashlib
import os
import stat
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from safetensors import SafetensorError

STORAGE_ERRORS = (OSError, RuntimeError, SafetensorError)
"""Errors that a refusing disk may cause; :func:`storage_failure` tells whether one did."""
SAMPLES, SAMPLE_BYTES = 64, 4096
"""Number and size in bytes of the samples that identify a file of weights: training changes nearly all weights, and reading the
whole file takes minutes."""


def storage_failure(error: BaseException) -> str | None:
    """The reason for which the disk refused, in the system's words; None if the error has another cause.

    torch's file writer reports a full disk as one of several RuntimeErrors, safetensors as its own error class.
    """
    if isinstance(error, OSError):
        return error.strerror or str(error)
    from_writer = any(
        mark in str(error) for mark in ("PytorchStreamWriter", "inline_container", "iostream", "os error")
    )
    return "the file could not be written whole" if from_writer else None


def write_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content`` so that a crash leaves either the whole old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".tmp")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    fsync(path.parent)


def fsync_tree(directory: Path) -> None:
    """Flush every file and folder below ``directory`` to disk."""
    for path in sorted(directory.rglob("*")):
        fsync(path)
    fsync(directory)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def sampled_sha256(path: Path) -> str:
    """Digest of a file's size and its :func:`samples`."""
    digest = hashlib.sha256(f"{path.stat().st_size} ".encode())
    for sample in samples(path):
        digest.update(sample)
    return digest.hexdigest()


def samples(path: Path) -> Iterator[bytes]:
    """``SAMPLES`` pieces of ``SAMPLE_BYTES``, evenly spread over a file; the whole content of a small file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= SAMPLES * SAMPLE_BYTES:
            yield file.read()
            return
        for sample in range(SAMPLES):
            file.seek(sample * (size - SAMPLE_BYTES) // (SAMPLES - 1))
            yield file.read(SAMPLE_BYTES)


def file_digests(directory: Path, digest: Callable[[Path], str] = sha256) -> dict[str, str]:
    """``digest`` of every file below ``directory``, keyed by relative POSIX path."""
    return {
        path.relative_to(directory).as_posix(): digest(path) for path in sorted(directory.rglob("*")) if path.is_file()
    }


def damaged_files(directory: Path, digests: dict[str, str], digest: Callable[[Path], str] = sha256) -> list[str]:
    """The files of ``digests`` that are missing below ``directory``, cannot be read, or differ."""

    def is_damaged(name: str) -> bool:
        try:
            return digest(directory / name) != digests[name]
        except OSError:
            return True

    return [name for name in sorted(digests) if is_damaged(name)]


def deviations(directory: Path, digests: dict[str, str], *, besides: Collection[str] = ()) -> list[str]:
    """Names or descriptions of files by which ``directory`` differs from ``digests`` plus the files ``besides``; empty if none
    does.

    Only plain files below the directory are read: no link is followed, and no name leads out of it.
    """
    if directory.is_symlink() or not directory.is_dir():
        return [f"{directory.name} is no plain folder"]
    modes = {path.relative_to(directory).as_posix(): path.lstat().st_mode for path in sorted(directory.rglob("*"))}
    files = {name for name, mode in modes.items() if stat.S_ISREG(mode)}
    if special := [name for name, mode in modes.items() if name not in files and not stat.S_ISDIR(mode)]:
        return [f"{name} is no plain file" for name in special]
    if surplus := sorted(files - {*digests, *besides}):
        return [f"{name} is none of its files" for name in surplus]
    return sorted(digests.keys() - files) or damaged_files(directory, digests)


def fsync(path: Path) -> None:
    """Flush one file, or the names in one folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
