"""Runs are found where they are, under names that can be shown, and mistakes get one sentence."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.watch.runs import Runs, UnknownRun, printable
from tests.support.paths import ROOT


def run_at(*folders: Path) -> None:
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").write_text("")


def ids(*roots: Path) -> list[str]:
    return [run.id for run in Runs(roots).all()]


def test_runs_are_found_at_any_depth_and_not_inside_of_their_own_folders(tmp_path: Path) -> None:
    run_at(tmp_path / "ppo" / "actor", tmp_path / "sft", tmp_path / "sweep" / "a" / "b", tmp_path / ".hidden")
    run_at(
        tmp_path / "sft" / "checkpoints" / "step_1", tmp_path / "sft" / "export", tmp_path / "1" / "2" / "3" / "4" / "5"
    )
    (tmp_path / "loop").symlink_to(tmp_path)
    top = tmp_path.name
    assert ids(tmp_path) == [f"{top}/ppo/actor", f"{top}/sft", f"{top}/sweep/a/b"]
    assert ids(tmp_path / "ppo", tmp_path / "sft", tmp_path / "sft") == ["ppo/actor", "sft"]


def test_equal_names_are_told_apart_by_the_folders_above(tmp_path: Path) -> None:
    run_at(tmp_path / "a" / "out", tmp_path / "b" / "out")
    assert ids(tmp_path / "a" / "out", tmp_path / "b" / "out") == ["a/out", "b/out"]


def test_a_run_may_appear_and_go(tmp_path: Path) -> None:
    runs = Runs([tmp_path])
    assert runs.all() == []
    run_at(tmp_path / "late")
    (late,) = runs.all()
    assert runs.get(late.id) == late
    (tmp_path / "late" / "metrics.jsonl").unlink()
    (tmp_path / "late").rmdir()
    with pytest.raises(UnknownRun, match=r"there is no run .*late"):
        runs.get(late.id)


@pytest.mark.parametrize("name", ["../secret", "/etc", "late/../../etc", "", "a\x00b"])
def test_an_id_is_a_name_and_no_path(tmp_path: Path, name: str) -> None:
    run_at(tmp_path / "late")
    with pytest.raises(UnknownRun):
        Runs([tmp_path]).get(name)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("plain name", "plain name"),
        ("größe 数", "größe 数"),
        ("50%", "50%25"),
        ("\u202egnp", "%E2%80%AEgnp"),
        ("a\nb\x1b[2J", "a%0Ab%1B[2J"),
        (os.fsdecode(b"\xff"), "%FF"),
    ],
)
def test_names_are_printable_and_differ(name: str, shown: str) -> None:
    assert printable(name) == shown


def test_folders_that_cannot_be_read_are_passed_over(tmp_path: Path) -> None:
    run_at(tmp_path / "open")
    (tmp_path / "file").write_text("")
    assert ids(tmp_path / "open", tmp_path / "file") == ["open"]


@pytest.mark.slow("starts the page's process")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["nowhere"],
            "error: nowhere does not exist: give folders of runs, or one above them in which runs will appear",
        ),
        (["file"], "error: file is a file: give folders of runs, such as outputs/ppo"),
        (
            ["runs", "--host=0.0.0.0"],
            "error: --host=0.0.0.0 would open the page to the network without a token: set --token-file",
        ),
        (["runs", "--host=no.such.host.invalid"], "error: --host=no.such.host.invalid "),
        (["runs", "--token-file=none"], "error: --token-file=none does not exist: write the shared secret into it"),
        (["runs", "--certificate=none"], "error: --certificate=none does not load"),
        (
            ["runs", "--port=PORT"],
            "error: --port=PORT on 127.0.0.1 cannot be bound: stop what listens there, or choose another",
        ),
        (["runs", "--export=nowhere/report.html"], ""),
        (["runs", "--export=file/report.html"], "error: "),
    ],
)
def test_a_mistake_gets_one_sentence(tmp_path: Path, words: list[str], sentence: str) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, ROOT / "trainers" / "watch.py", *(word.replace("PORT", port) for word in words)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    if not sentence:
        assert (done.returncode, done.stderr) == (0, "") and (tmp_path / "nowhere" / "report.html").exists()
        return
    (shown,) = done.stderr.splitlines()
    assert done.returncode == 2 and shown.startswith(sentence.replace("PORT", port)), shown


def test_nothing_is_given_as_root() -> None:
    with pytest.raises(UserError, match="does not exist"):
        Runs([Path("/nowhere/at/all")])
