"""A full disk is called by its name, whichever library has met it. /dev/full refuses as a full disk does."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from nemo_style_rlhf.checkpoint.files import storage_errors
from nemo_style_rlhf.errors import StorageError


def of_safetensors(path: Path) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


WRITERS: dict[str, Callable[[Path], object]] = {
    "python": lambda path: path.write_text("x"),
    "torch": lambda path: torch.save({"weight": torch.zeros(2**16)}, path),
    "safetensors": of_safetensors,
}


@pytest.fixture
def full(tmp_path: Path) -> Path:
    path = tmp_path / "full"
    path.symlink_to("/dev/full")
    return path


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_named_with_what_is_missing(tmp_path: Path, full: Path, writer: str) -> None:
    """In gibibytes, if it is known how much is to be written."""
    sentence = (
        rf"^the model cannot be written \(disk full: (2|2\.0) GiB missing in {tmp_path}\): make room and start again"
    )
    below, needed = tmp_path / "not there yet" / "model", shutil.disk_usage(tmp_path).free + 2 * 2**30
    with pytest.raises(StorageError, match=sentence), storage_errors("the model", folder=below, needed=needed):
        WRITERS[writer](full)


def test_a_disk_is_named_if_what_was_to_be_written_is_a_path(tmp_path: Path, full: Path) -> None:
    """That of the file, wherever a link to it lies."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "file")
    with pytest.raises(StorageError, match=rf"\(disk full: {tmp_path}/disk\)"), storage_errors(tmp_path / "link"):
        full.write_text("x")


def test_any_other_refusal_has_the_systems_words(tmp_path: Path, full: Path) -> None:
    with pytest.raises(StorageError, match=r"\(Not a directory\)"), storage_errors(tmp_path):
        (full / "below").write_text("x")
