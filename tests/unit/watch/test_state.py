"""A run's state is that of its folder's owner, as real owners leave it."""

import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from nemo_style_rlhf.checkpoint.owner import owned
from nemo_style_rlhf.schema.common import RunConfig
from nemo_style_rlhf.tracking.metrics import TIME
from nemo_style_rlhf.watch import state
from nemo_style_rlhf.watch.configs import differing, starts
from nemo_style_rlhf.watch.metrics import Logs
from nemo_style_rlhf.watch.runs import Run
from nemo_style_rlhf.watch.state import States, seconds_per_step


def own(folder: str, told: Any) -> None:
    with owned(RunConfig(output_dir=folder), "trainer"):
        told.send("mine")
        told.recv()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [
        {"step": step, "timers/step": 2.0, TIME: 100.0 + 3 * step, "train_rollouts/rewards": step / 4}
        for step in range(1, 5)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.yaml").write_text("algorithm:\n  max_steps: 10\n")
    return tmp_path


def told(folder: Path, states: States | None = None) -> dict[str, Any]:
    return (states or States(Logs())).of(Run("run", folder))


def test_a_run_is_running_while_its_owner_lives_and_has_died_once_that_is_killed(folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=own, args=(str(folder), there))
    process.start()
    here.recv()
    before = sorted(path.name for path in folder.iterdir())
    running = told(folder)
    assert (running["state"], running["step"], running["total_steps"], running["eta_s"]) == ("running", 4, 10, 18.0)
    assert f"process {process.pid}" in running["owner"]
    os.kill(process.pid or 0, signal.SIGSTOP)
    assert told(folder)["state"] == "running"  # it keeps the folder, and may go on
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    died = told(folder)
    assert (died["state"], died["eta_s"]) == ("died", None)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_an_owner_that_ends_in_peace_leaves_a_run_stopped_or_finished(folder: Path) -> None:
    with owned(RunConfig(output_dir=str(folder)), "trainer"):
        pass
    assert told(folder)["state"] == "stopped"
    (folder / "done.json").write_text("{}")
    assert told(folder)["state"] == "finished"


def test_an_owner_on_another_machine_lives_while_its_heart_beats(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = {"id": "ab", "kernel": "another", "host": "node7", "pid": 7, "since": "2026-11-25"}
    (folder / ".owner_trainer.json").write_text(json.dumps(record))
    pulse, states, now = folder / ".owner_trainer.another", States(Logs()), 1000.0
    monkeypatch.setattr(state.time, "monotonic", lambda: now)
    for beat in range(3):
        pulse.write_text(f"ab {beat}")
        assert told(folder, states)["state"] == "running"
        now += 50
    assert told(folder, states)["state"] == "running"
    now += 50
    assert told(folder, states)["state"] == "died"
    assert "node7" in told(folder, states)["owner"]


def test_a_folder_without_anything_is_new(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{damaged")
    found = told(tmp_path)
    assert (found["state"], found["step"], found["kind"], found["headline"]) == ("new", None, "run", {})


def test_the_pace_is_that_of_the_last_steps_and_a_pause_does_not_count() -> None:
    rows = [{"step": step, "timers/step": 1.0, TIME: 2.0 * step + (1000 if step > 5 else 0)} for step in range(10)]
    assert seconds_per_step(rows) == 2.0
    assert seconds_per_step([{"step": 1, "timers/step": 4.0}]) == 4.0
    assert seconds_per_step([{"step": 0, "val_rollouts/rewards": 4.0}]) is None


def test_the_newest_start_says_how_many_steps_there_are(folder: Path) -> None:
    events = [{"step": 0, "kind": "start", "total_steps": 12}, {"step": 4, "kind": "start", "total_steps": 20}]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert told(folder)["total_steps"] == 20


def test_configurations_differ_where_they_do(tmp_path: Path) -> None:
    texts = [
        "a: 1\nb: {c: x, d: [1, 2]}\nrun: {output_dir: p}\n",
        "a: 1\nb: {c: <b>, d: [1, 2]}\ne: null\nrun: {output_dir: q}\n",
    ]
    runs = []
    for number, text in enumerate(texts):
        runs.append(Run(str(number), tmp_path / str(number)))
        (runs[-1].folder / "configs").mkdir(parents=True)
        (runs[-1].folder / "config.yaml").write_text(text)
        (tmp_path / "0" / "configs" / f"00{number + 1}_step_00000{number}.yaml").write_text(text)
    assert differing(runs) == [{"key": "b.c", "values": ['"x"', '"<b>"']}, {"key": "e", "values": [None, "null"]}]
    first, second = starts(runs[0].folder)
    assert (first["after"], first["changes"]) == ("step_000000", [])
    assert (second["after"], [each["key"] for each in second["changes"]]) == ("step_000001", ["b.c", "e"])
