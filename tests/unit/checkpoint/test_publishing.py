"""A file or folder is published whole or not at all, and publishing touches nothing else beside it."""

import os
import shutil

import pytest
import torch
from safetensors.torch import save_file

from nemo_style_rlhf.checkpoint.files import finish_publishing, published


def write(target, text):
    with published(target) as beside:
        beside.mkdir()
        (beside / "weights").write_text(text)


def test_a_folder_is_replaced_as_a_whole_and_its_neighbors_stay(tmp_path):
    for kept in ("export.old", "export.bak"):
        (tmp_path / kept).mkdir()
    write(tmp_path / "export", "first")
    (tmp_path / "export" / "surplus").write_text("of the first")
    write(tmp_path / "export", "second")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "export.bak", "export.old"]
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["weights"]
    assert (tmp_path / "export" / "weights").read_text() == "second"


def test_a_failure_leaves_what_was_there(tmp_path):
    write(tmp_path / "export", "first")

    def fails():
        with published(tmp_path / "export") as beside:
            beside.mkdir()
            (beside / "weights").write_text("sec")
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        fails()
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert (tmp_path / "export" / "weights").read_text() == "first"


@pytest.mark.parametrize("new_has_its_name", [False, True])
def test_a_crash_between_or_after_the_two_renames_is_mended(tmp_path, new_has_its_name):
    write(tmp_path / ".export.replaced", "first")
    write(tmp_path / ("export" if new_has_its_name else "export.tmp"), "second")
    finish_publishing(tmp_path / "export")
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert (tmp_path / "export" / "weights").read_text() == ("second" if new_has_its_name else "first")


def test_a_file_is_replaced(tmp_path):
    for content in (b"first", b"second"):
        with published(tmp_path / "below" / "file") as beside:
            beside.write_bytes(content)
    assert [path.read_bytes() for path in (tmp_path / "below").iterdir()] == [b"second"]


@pytest.mark.parametrize(
    ("umask", "folders", "files"), [(0o022, 0o755, 0o644), (0o027, 0o750, 0o640), (0o077, 0o700, 0o600)]
)
def test_everything_in_a_folder_has_the_mode_of_the_users_umask(tmp_path, umask, folders, files):
    (tmp_path / "private").mkdir(mode=0o700)
    save_file({"weight": torch.ones(2)}, tmp_path / "private" / "weights")
    before = os.umask(umask)
    try:
        with published(tmp_path / "export") as beside:
            beside.mkdir()
            save_file({"weight": torch.ones(2)}, beside / "model.safetensors")
            (beside / "config.json").write_text("{}")
            shutil.copytree(tmp_path / "private", beside / "copy")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("export/**/*")}
    assert modes == {"model.safetensors": files, "config.json": files, "copy": folders, "weights": files}
    assert (tmp_path / "export").stat().st_mode & 0o777 == folders
