"""A long TMPDIR leaves room for the paths of sockets, or is one sentence."""

import tempfile
from pathlib import Path

import pytest

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.wire import short_paths
from nemo_style_rlhf.wire.short_paths import LONGEST, parent_of_sockets


def test_a_long_folder_gives_way_to_a_short_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("d" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert len(parent_of_sockets()) <= LONGEST
    monkeypatch.setattr(short_paths, "OTHERS", (str(long),))
    with pytest.raises(UserError, match=rf"^TMPDIR={long} is too long .* at most 39 characters$"):
        parent_of_sockets()
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    assert parent_of_sockets() == "/tmp"
