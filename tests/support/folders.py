"""Folders that several workers share, or that another user looks into, and files that nobody can read."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that the first worker to ask for it makes, and the others find made; they only read it."""
    own = factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    made = folder.with_suffix(".made")
    with FileLock(folder.with_suffix(".lock")):
        if not made.exists():
            folder.mkdir()
            make(folder)
            made.touch()
    return folder


def let_others_read(folder: Path) -> None:
    """Open ``folder`` to every user, and those above it as far as pytest has made them."""
    temporary = Path(tempfile.gettempdir())
    for each in (folder, *folder.parents):
        if each.is_relative_to(temporary) and each != temporary:
            each.chmod(0o755)


def make_unreadable(path: Path) -> None:
    """Replace a file by one that the kernel refuses to read: the first byte raises an input/output error."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


def note_disk_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """The paths that this process flushes to disk and deletes from now on, in order."""
    done: list[tuple[str, Path]] = []
    fsync, unlink, rmtree = os.fsync, Path.unlink, shutil.rmtree

    def flush(descriptor: int) -> None:
        done.append(("flushed", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def delete(path: Path, **how: bool) -> None:
        done.append(("deleted", path))
        unlink(path, **how)

    def delete_tree(path: Path, **how: bool) -> None:
        done.append(("deleted", path))
        rmtree(path, **how)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(Path, "unlink", delete)
    monkeypatch.setattr(shutil, "rmtree", delete_tree)
    return done
