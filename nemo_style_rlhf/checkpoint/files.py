"""Durable files: written under another name, flushed to disk, renamed; and digests that prove them undamaged."""

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from nemo_style_rlhf.checkpoint.owner import require_owned
from nemo_style_rlhf.errors import StorageError

STORAGE_ERRORS = (OSError, RuntimeError, SafetensorError)
"""Errors that a refusing disk may cause; :func:`storage_failure` tells whether one did."""
SAMPLES, SAMPLE_BYTES = 64, 4096
"""Number and size in bytes of the samples that identify a file of weights: training changes nearly all weights, and reading the
whole file takes minutes."""


@dataclass(frozen=True)
class Space:
    """The space on a disk when something begins to be written there."""

    folder: Path
    free: int
    """Bytes."""
    needed: int
    """Bytes of what is written; 0 if that is not known."""

    @classmethod
    def of(cls, path: Path, needed: int = 0) -> "Space":
        """The space on the disk of ``path``; the path need not exist."""
        folder = next(parent for parent in (path, *path.resolve().parents) if parent.is_dir())
        return cls(folder, shutil.disk_usage(folder).free, needed)

    def __str__(self) -> str:
        missing = self.needed - self.free
        return (
            f"disk full: {missing / 2**30:.2g} GiB missing in {self.folder}"
            if missing > 0
            else f"disk full: {self.folder}"
        )


def storage_failure(error: BaseException, space: Space | None = None) -> str | None:
    """The reason why the disk refused; None if the error has another cause.

    torch's file writer reports a full disk as one of several RuntimeErrors, safetensors as its own error class.
    """
    if isinstance(error, OSError):
        full = error.errno == errno.ENOSPC
        reason = os.strerror(error.errno) if error.errno else str(error)  # pyarrow puts words of its own into strerror
    elif any(mark in str(error) for mark in ("PytorchStreamWriter", "inline_container", "iostream", "os error")):
        full = f"os error {errno.ENOSPC}" in str(error) or (space is not None and space.needed > space.free)
        reason = "the file could not be written whole"
    else:
        return None
    return (str(space) if space else "disk full") if full else reason


@contextmanager
def storage_errors(
    what: str | Path, remedy: str = "make room and start again, the run goes on from its last checkpoint", *,
    folder: Path | None = None, needed: int = 0,
) -> Iterator[None]:  # fmt: skip
    """Context in which ``what`` is written.

    Args:
        remedy: end of the error's sentence: what users should do.
        folder: where it is written, if ``what`` is not a path.
        needed: its bytes, as far as they are known.

    Raises:
        StorageError: the disk refused.
    """
    where = what if isinstance(what, Path) else folder
    space = None if where is None else Space.of(where, needed)
    try:
        yield
    except STORAGE_ERRORS as error:
        if (reason := storage_failure(error, space)) is None:
            raise
        raise StorageError(f"{what} cannot be written ({reason}): {remedy}") from error


def unpublished(target: Path) -> Path:
    """The temporary path that :func:`published` yields for a new ``target``."""
    return target.with_name(target.name + ".tmp")


@contextmanager
def published(target: Path) -> Iterator[Path]:
    """Context that yields a free path for a new file or folder. When the block ends, it is flushed to disk and renamed to
    ``target``, so that a crash leaves either the whole old one or the whole new one. If the block fails, it is removed.

    No system call replaces a folder: an old one is renamed first, and :func:`finish_publishing` mends what a crash leaves.

    Raises:
        UserError: this process no longer owns its output folder; another process's files stay as they are.
    """
    beside, replaced = unpublished(target), _replaced(target)
    require_owned()
    target.parent.mkdir(parents=True, exist_ok=True)
    finish_publishing(target)
    try:
        yield beside
        fsync_tree(beside)
        require_owned()
        if target.is_dir():
            target.rename(replaced)
        beside.replace(target)
        fsync(target.parent)
    except BaseException:
        require_owned()
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        remove(beside)
        raise
    remove(replaced)


def finish_publishing(target: Path) -> None:
    """Remove what a crash during :func:`published` has left, and give an old folder its name back if the new one is missing."""
    remove(unpublished(target))
    if _replaced(target).exists() and not target.exists():
        _replaced(target).rename(target)
    remove(_replaced(target))


def _replaced(target: Path) -> Path:
    """Temporary name of the old folder, unlike any name that users give to copies of an export."""
    return target.with_name(f".{target.name}.replaced")


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all that is in it, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    with published(path) as beside:
        beside.write_bytes(content)


def fsync_tree(path: Path) -> None:
    """Flush a file, or a folder with every file and folder below it, to disk. All get the folder's mode, so that the user's umask
    holds: safetensors makes files of mode 0600, and a copy has its source's mode."""
    mode = stat.S_IMODE(path.stat().st_mode)
    for below in sorted(path.rglob("*")):
        wanted = mode if below.is_dir() else mode & 0o666
        if not below.is_symlink() and stat.S_IMODE(below.stat().st_mode) != wanted:
            below.chmod(wanted)
        fsync(below)
    fsync(path)


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


def file_digests(
    directory: Path, digest: Callable[[Path], str] = sha256, *, besides: Collection[str] = ()
) -> dict[str, str]:
    """``digest`` of every file below ``directory``, but not below the folders ``besides`` in it, keyed by relative POSIX path."""
    below = {path.relative_to(directory): path for path in sorted(directory.rglob("*"))}
    return {
        name.as_posix(): digest(path) for name, path in below.items() if name.parts[0] not in besides and path.is_file()
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
