"""Models and rows are known by their content."""

import json
from pathlib import Path

import pytest

from nemo_style_rlhf.checkpoint.files import SAMPLE_BYTES, SAMPLES
from nemo_style_rlhf.models.digests import model_fingerprint, rows_fingerprint


def model(folder: Path, weights: bytes, **config: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


@pytest.mark.parametrize("size", [1000, 3 * SAMPLES * SAMPLE_BYTES + 5])
def test_a_model_is_known_by_its_content_wherever_it_lies(tmp_path: Path, size: int) -> None:
    weights = bytes(size)
    first = model_fingerprint(str(model(tmp_path / "first", weights, layers=2)))
    assert model_fingerprint(str(model(tmp_path / "moved", weights, layers=2))) == first
    assert model_fingerprint(str(model(tmp_path / "config", weights, layers=3))) != first
    assert model_fingerprint(str(model(tmp_path / "longer", weights + b"0", layers=2))) != first
    assert model_fingerprint(str(model(tmp_path / "end", weights[:-1] + b"1", layers=2))) != first
    assert model_fingerprint(str(model(tmp_path / "other", b"1" * size, layers=2))) != first
    assert model_fingerprint("owner/name") == "owner/name"


def test_rows_are_known_by_content_and_order() -> None:
    rows = [(0, [1, 2]), (1, [3])]
    assert rows_fingerprint(iter(rows)) == rows_fingerprint(rows) and rows_fingerprint(rows).startswith(
        "2 rows, sha256 "
    )
    others = [rows[::-1], rows[:1], [(0, [1, 2]), (2, [3])], [(0, [1]), (1, [2, 3])]]
    assert len({rows_fingerprint(some) for some in [rows, *others]}) == 5
