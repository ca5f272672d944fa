"""Metrics are read while they are written, once each, and anew after a rewind."""

import json
import os
import random
from pathlib import Path

import pytest

from nemo_style_rlhf.schema.tracking import TrackingConfig
from nemo_style_rlhf.tracking.metrics import MetricsWriter
from nemo_style_rlhf.watch.metrics import Cursor, Log, by_metric, thinned


def line(step: int, **values: object) -> bytes:
    return json.dumps({"step": step, **values}).encode() + b"\n"


def test_a_reader_gets_every_line_once_however_the_bytes_arrive(tmp_path: Path) -> None:
    path, chance = tmp_path / "metrics.jsonl", random.Random(0)
    whole = b"".join(line(step, reward=step / 2) for step in range(200))
    log, cursor, seen = Log(path), Cursor(), []
    for start in range(0, len(whole), 37):
        with path.open("ab") as file:
            file.write(whole[start : start + 37])
        if chance.random() < 0.6:
            rows, cursor = log.since(cursor)
            seen += rows
    seen += log.since(cursor)[0]
    assert [row["step"] for row in seen] == list(range(200))
    assert log.rows() == seen


@pytest.mark.parametrize("read_between", [True, False])
def test_a_resume_makes_the_reader_begin_again(tmp_path: Path, read_between: bool) -> None:
    writer, log = MetricsWriter(tmp_path, TrackingConfig(), {}), Log(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        writer.write(step, {"reward": 1.0})
    _, cursor = log.since(Cursor())
    writer.rewind(3)
    if read_between:
        rows, cursor = log.since(cursor)
        assert [row["step"] for row in rows] == [1, 2, 3]
    for step in range(4, 9):  # longer than before
        writer.write(step, {"reward": 2.0})
    rows, after = log.since(cursor)
    assert [row["step"] for row in rows] == ([4, 5, 6, 7, 8] if read_between else list(range(1, 9)))
    assert (after.life == cursor.life) == read_between
    assert [row["reward"] for row in log.rows()] == [1.0] * 3 + [2.0] * 5


def test_a_file_that_was_replaced_by_one_of_the_same_length_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1, a=1) + line(2, a=1))
    log = Log(path)
    _, cursor = log.since(Cursor())
    path.write_bytes(line(1, a=1) + line(2, a=3))
    assert log.since(cursor)[0][-1] == {"step": 2, "a": 3}
    os.remove(path)
    assert log.rows() == []


@pytest.mark.parametrize(
    "damaged",
    [b'{"step": 1, "rew\n', b"\xff\xfe\n", b"\0" * 5000 + b"\n", b"[1]\n", b'{"step": true}\n', b"[" * 10**5 + b"\n"],
)
def test_damaged_lines_are_left_out(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(line(1, a=1) + damaged + line(2, a=2))
    assert [row["step"] for row in Log(tmp_path / "metrics.jsonl").rows()] == [1, 2]


def test_points_of_a_metric() -> None:
    rows = [{"step": 2, "a": 1, "text": "x"}, {"step": 1, "a": float("nan"), "b": True}, {"step": 2, "a": 5.0}]
    assert by_metric(rows) == {"a": ([1, 2], [None, 5.0]), "b": ([1], [1.0])}


def test_thinning_keeps_order_ends_of_the_range_and_every_spike() -> None:
    chance = random.Random(1)
    points: dict[int, float | None] = {step: chance.random() for step in range(50_000)}
    points[31_415], points[27_182], points[5] = 100.0, -100.0, None
    steps, values = thinned(points, 1000)
    assert len(steps) <= 1000 and steps == sorted(steps)
    assert (max(filter(None, values)), min(filter(None, values))) == (100.0, -100.0)
    assert all(points[step] == value for step, value in zip(steps, values, strict=True))
    assert thinned({3: 1.0, 1: 2.0}, 10) == ([1, 3], [2.0, 1.0])
