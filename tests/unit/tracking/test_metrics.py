"""A run goes on whatever has happened to its metrics.jsonl, or says in one sentence why it cannot."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.tracking import TrackingConfig
from nemo_style_rlhf.tracking.metrics import MetricsWriter, _wandb_id
from nemo_style_rlhf.tracking.progress import ppo_status
from tests.support.folders import let_others_read
from tests.support.metrics import metrics, without_timers

GOOD = [json.dumps({"step": step, "reward": step / 2}).encode() for step in range(4)]
ONE, TWO = GOOD[1:3]
DAMAGED = {
    "a line cut short": b'{"step": 1, "rew',
    "invalid UTF-8": b'{"step": 1, "\xff\xfe": 2}',
    "NUL bytes, as a crash of the machine leaves them": b"\0" * 4096,
    "no object": b"17",
    "a list": b"[1, 2]",
    "null": b"null",
    "no step": b'{"reward": 1.0}',
    "a step that is text": b'{"step": "1"}',
    "a step that is a fraction": b'{"step": 1.5}',
    "a step that is null": b'{"step": null}',
    "a step that is true": b'{"step": true}',
    "a number of too many digits": b'{"step": ' + b"9" * 5000 + b"}",
    "nested too deeply": b"[" * 10**6,
    "two lines in one": ONE + TWO,
    "a huge line": b'{"step": 1, "x": "' + b"x" * 2**24,
}  # fmt: skip
FINE = {
    "as it was written": (b"".join(line + b"\n" for line in GOOD), GOOD[:3]),
    "Windows line ends": (b"".join(line + b"\r\n" for line in GOOD), GOOD[:3]),
    "empty lines": (b"\n\n" + ONE + b"\n \n" + TWO + b"\n\n", [ONE, TWO]),
    "no newline at the end": (ONE + b"\n" + TWO, [ONE, TWO]),
    "several lines of a step, as Lightning writes them": (ONE + b"\n" + ONE + b"\n" + TWO + b"\n", [ONE, ONE, TWO]),
    "a line separator of Unicode in a name": (
        '{"step": 1, "\u2028": 2}\n'.encode(),
        ['{"step": 1, "\u2028": 2}'.encode()],
    ),
    "empty": (b"", []),
}


def rewound(folder: Path) -> list[bytes]:
    """The lines after a resume from step 2."""
    MetricsWriter(folder, TrackingConfig(), {}).rewind(2)
    return (folder / "metrics.jsonl").read_bytes().split(b"\n")[:-1]


@pytest.mark.parametrize("where", ["first", "in the middle", "last", "last and torn off"])
@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_line_is_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, where: str
) -> None:
    lines = list(GOOD)
    lines.insert({"first": 0, "in the middle": 2}.get(where, len(lines)), DAMAGED[kind])
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines) + (b"" if where == "last and torn off" else b"\n"))
    with caplog.at_level(logging.WARNING):
        assert rewound(tmp_path) == GOOD[:3]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'metrics.jsonl'}: damaged lines left out, 1 of 5"
    ]


@pytest.mark.parametrize("kind", FINE)
def test_what_is_fine_is_kept_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    content, kept = FINE[kind]
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert rewound(tmp_path) == kept
    assert not caplog.records


def test_without_a_file_there_is_nothing_to_forget(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, TrackingConfig(), {})
    writer.rewind(2)
    assert not (tmp_path / "metrics.jsonl").exists()
    writer.write(3, {"reward": 1.0})
    (line,) = without_timers(metrics(tmp_path))
    assert line == {"step": 3, "reward": 1.0}


@pytest.fixture
def ordinary_user(tmp_path: Path) -> Iterator[None]:
    """Root may read everything."""
    uid = os.geteuid()
    if uid == 0:
        let_others_read(tmp_path)
        tmp_path.chmod(0o777)
        os.seteuid(65534)
    yield
    os.seteuid(uid)


@pytest.mark.parametrize("kind", ["a folder", "a circle of links", "no permission"])
def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, kind: str, ordinary_user: None) -> None:
    path = tmp_path / "metrics.jsonl"
    if kind == "a folder":
        path.mkdir()
    elif kind == "a circle of links":
        path.symlink_to(path)
    else:
        path.write_bytes(b"".join(GOOD))
        path.chmod(0)
    why = {"a folder": "Is a directory", "a circle of links": "Too many levels", "no permission": "Permission denied"}[
        kind
    ]
    with pytest.raises(UserError, match=rf"metrics\.jsonl cannot be read \({why}.*\): move it away, or"):
        rewound(tmp_path)


def test_a_line_that_was_written_late_goes_with_the_steps_after_which_it_was_written(tmp_path: Path) -> None:
    rows = [{"step": 1}, {"step": 2}, {"step": 0, "val": 1}, {"step": 3}, {"step": 2, "val": 2}, {"step": 4}]
    for step, left in ((2, rows[:2]), (3, rows[:4]), (4, rows), (5, rows), (-1, [])):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        MetricsWriter(tmp_path, TrackingConfig(), {}).rewind(step)
        assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == left


def test_events_of_repeated_steps_are_forgotten_with_their_metrics(tmp_path: Path) -> None:
    """Those of the step that a run resumes from stay, in their order."""
    writer = MetricsWriter(tmp_path, TrackingConfig(), {})
    for step in (0, 2, 2, 3):
        writer.event(step, "health", "a <sentence>", metric="entropy")
    writer.write(3, {"reward": 1.0})
    before = (tmp_path / "events.jsonl").read_bytes().splitlines(keepends=True)
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"step": 1, "kin')
    writer.rewind(2)
    assert (tmp_path / "events.jsonl").read_bytes() == b"".join(before[:3])
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    writer.rewind(-1)
    assert (tmp_path / "events.jsonl").read_bytes() == b""


def test_a_resumed_run_goes_on_in_tensorboard_and_on_wandb(tmp_path: Path) -> None:
    """TensorBoard forgets the steps that are repeated, and a run has one id on W&B."""
    config = TrackingConfig(tensorboard=True)
    first = MetricsWriter(tmp_path, config, {})
    for step in range(1, 5):
        first.write(step, {"reward": float(step)})
    first.close()
    again = MetricsWriter(tmp_path, config, {})
    again.rewind(2)
    again.write(3, {"reward": 30.0})
    again.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    ids = {_wandb_id(tmp_path), _wandb_id(tmp_path)}
    (tmp_path / "other").mkdir()
    assert len(ids) == 1 and _wandb_id(tmp_path / "other") not in ids


def test_a_small_negative_number_is_shown_as_0() -> None:
    assert ppo_status(reward=-0.0004, kl=-0.00001, tokens_per_second=1.0) == "reward 0.000  KL 0.0000  1 tokens/s"
    assert "reward -0.001  KL -0.0001" in ppo_status(reward=-0.0006, kl=-0.00006, tokens_per_second=1.0)
