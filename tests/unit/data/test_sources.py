"""Where rows come from: files of every kind, patterns, lists, folders with configurations and splits, the hub."""

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_style_rlhf.data.sources import read_records
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.paths import data_source
from nemo_style_rlhf.schema.sources import DataSet
from tests.support.paths import ROOT

ROWS = [{"prompt": f"w{number}", "turns": [{"role": "user", "content": "ä\u2028"}]} for number in range(4)]


def read(*sources: str) -> list[dict]:
    records = list(read_records(list(sources) if len(sources) > 1 else sources[0]))
    assert [record.index for record in records] == list(range(len(records)))
    assert len({record.where for record in records}) == len(records)
    return [record.fields for record in records]


def lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The same rows in every kind of file and folder; `parts` holds two each."""
    import datasets

    texts = {"jsonl": lines(ROWS), "json": json.dumps(ROWS, indent=1), "ndjson": "\ufeff" + lines(ROWS)}
    for ending, text in texts.items():
        (tmp_path / f"rows.{ending}").write_text(text, encoding="utf-8")
        (tmp_path / f"rows.{ending}.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "lines.json").write_text(lines(ROWS))
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(str(tmp_path / "rows.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict(train=table, test=table.select([3])).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "parts").mkdir()
    for part in (1, 0):
        (tmp_path / "parts" / f"{part}.jsonl").write_text(lines(ROWS[2 * part : 2 * part + 2]))
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "a.jsonl").write_text(lines(ROWS))
    (tmp_path / "hub" / "b.jsonl").write_text(lines(ROWS[:1]))
    (tmp_path / "hub" / "README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: first\n  data_files:\n  - {split: train, path: a.jsonl}\n  - {split: test, path: b.jsonl}\n"
        "- config_name: second\n  data_files:\n  - {split: train, path: b.jsonl}\n---\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    "source",
    [
        *(f"rows.{kind}" for kind in ("jsonl", "json", "ndjson", "jsonl.gz", "json.gz", "ndjson.gz", "parquet")),
        "lines.json", "saved", "splits", "splits:train", "parts/*.jsonl", "parts/[01].jsonl", "**/[01].jsonl", "hub:first:train",
        "hub:first:", "hub:first:train[:100%]",
    ],
)  # fmt: skip
def test_every_source_has_the_same_rows(folder: Path, source: str) -> None:
    path = str(folder / source)
    assert data_source(path) is None
    assert read(path) == ROWS


@pytest.mark.parametrize(
    ("source", "rows"),
    [
        ("splits:test", ROWS[3:]),
        ("hub:first:test", ROWS[:1]),
        ("hub:second:train", ROWS[:1]),
        ("hub:first:train[:2]", ROWS[:2]),
    ],
)
def test_configuration_and_split_choose_rows(folder: Path, source: str, rows: list[dict]) -> None:
    assert read(str(folder / source)) == rows


def test_several_sources_follow_each_other_and_are_numbered_through(folder: Path) -> None:
    assert read(*(str(folder / name) for name in ("rows.json.gz", "splits:test", "parts/1.jsonl"))) == [
        *ROWS, ROWS[3], *ROWS[2:]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("none.jsonl", "does not exist: expected a .jsonl"),
        ("parts/x*.jsonl", "does not exist"),
        ("splits:validation", "it has no split validation but train, test"),
        ("saved:test", "written by save_to_disk as one table, without splits"),
        ("splits:first:train", "written by save_to_disk, which knows no configurations"),
        ("hub:third:train", "third"),
        ("hub:first:validation", "validation"),
        ("hub", r"Config name is missing.*\['first', 'second'\]"),
        ("broken.json", r"broken\.json line 2 is not valid JSON .* expected an array of objects"),
        ("mixed.json", r"mixed\.json row 1 holds str, expected an array of JSON objects"),
        ("object.json", r"line 1 is not valid JSON .* expected one object per line"),
        ("short.json.gz", "cannot be read as gzip-compressed UTF-8"),
        ("damaged.json.gz", "cannot be read as gzip-compressed UTF-8"),
        ("broken.parquet", "cannot be loaded as a data set"),
    ],
)
def test_a_source_that_cannot_be_read_is_one_sentence(folder: Path, source: str, sentence: str) -> None:
    (folder / "broken.json").write_text('[{"prompt": "a"},\n{"prompt": ]')
    (folder / "mixed.json").write_text('[{"prompt": "a"}, "b"]')
    (folder / "object.json").write_text('{\n"data": []}')
    (folder / "short.json.gz").write_bytes(gzip.compress(json.dumps(ROWS * 100).encode())[:-12])
    damaged = bytearray(gzip.compress(json.dumps(ROWS * 100).encode()))
    damaged[10] = 255  # the first byte of the compressed stream: a block of no known type
    (folder / "damaged.json.gz").write_bytes(damaged)
    (folder / "broken.parquet").write_bytes((folder / "rows.parquet").read_bytes()[:100])
    with pytest.raises(UserError, match=sentence) as raised:
        read(str(folder / source))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        ("owner/name", DataSet("owner/name")),
        ("owner/name:test", DataSet("owner/name", None, "test")),
        ("owner/name:main:test", DataSet("owner/name", "main", "test")),
        ("owner/name:train[10%:20%]", DataSet("owner/name", None, "train[10%:20%]")),
        ("owner/name:main:train[:10]", DataSet("owner/name", "main", "train[:10]")),
    ],
)
def test_names_on_the_hub_have_configuration_and_split(given: str, parsed: DataSet) -> None:
    assert DataSet.parse(given) == parsed
    assert parsed.may_be_on_hub and data_source(given) is None


def test_a_hub_that_does_not_answer_costs_seconds_and_is_one_sentence() -> None:
    script = "from nemo_style_rlhf.data.sources import read_records; list(read_records('owner/name:main:train'))"
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "PYTHONPATH": str(ROOT)}
    environment.pop("HF_HUB_OFFLINE", None)
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60)
    assert time.monotonic() - began < 20  # most of it imports; the library alone tries for half a minute
    assert "http://127.0.0.1:9 did not answer within 5 s: data sets are read from the local cache" in done.stderr
    assert (
        "UserError: owner/name:main:train cannot be loaded as a data set (Couldn't reach"
        in done.stderr.splitlines()[-1]
    )


@pytest.mark.parametrize("name", ["[a]", "?a", "*", "a=b,c", "it's {a} #%é"])
def test_a_file_is_read_whatever_its_name(folder, name):
    (folder / "xa.parquet").write_bytes(b"another file")
    for ending in ("jsonl", "parquet"):
        (folder / f"{name}.{ending}").write_bytes((folder / f"rows.{ending}").read_bytes())
        assert read(str(folder / f"{name}.{ending}")) == ROWS


def test_a_folder_whose_name_is_a_pattern_is_refused(folder):
    (folder / "part?").mkdir()
    (folder / "part?" / "rows.jsonl").write_text(lines(ROWS[:1]))
    with pytest.raises(UserError, match=r"takes \*, \?, \[ and :: in a folder's path for a pattern: rename the folder"):
        read(str(folder / "part?"))
