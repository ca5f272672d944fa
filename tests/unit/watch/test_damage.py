"""One damaged run, whoever made it so, changes nothing about the others and says what is damaged."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_style_rlhf.watch.rollout_files import list_files
from nemo_style_rlhf.watch.rollout_sources import RolloutSources
from nemo_style_rlhf.watch.run_routes import Sources
from nemo_style_rlhf.watch.runs import Runs
from nemo_style_rlhf.watch.tokens import load_tokenizer

ROWS = "".join(json.dumps({"step": step, "train/loss": 1.0 / step}) + "\n" for step in range(1, 4))
BOMB = "a: &a [x, x]\n" + "".join(f"{new}: &{new} [*{old}, *{old}]\n" for old, new in zip("abcdefgh", "bcdefghi"))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def huge(path: Path) -> None:
    with path.open("ab") as file:
        file.truncate(2**31)


def written(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text) and None


def row(**values: Any) -> Callable[[Path], None]:
    return written(ROWS + json.dumps({"step": 4, **values}) + "\n")


DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "a pipe": ("metrics.jsonl", pipe, "metrics.jsonl: it is no regular file"),
    "a pipe as configuration": ("config.yaml", pipe, "config.yaml: it is no regular file"),
    "a link out of the run": ("metrics.jsonl", link, "metrics.jsonl: it is a link out of the run's folder"),
    "a configuration elsewhere": ("config.yaml", link, "config.yaml: it is a link out of the run's folder"),
    "a huge configuration": ("config.yaml", huge, "config.yaml: it has 2147483648 bytes"),
    "an alias bomb": ("config.yaml", written(BOMB), "config.yaml: it has aliases, which no run writes"),
    "a list": ("config.yaml", written("[1, 2]"), "config.yaml: it is no configuration"),
    "an impossible date": ("config.yaml", written("a: 2026-13-45"), "config.yaml: month must be in 1..12"),
    "deep": ("config.yaml", written("[" * 5000), "config.yaml: "),
    "bytes": ("config.yaml", lambda path: path.write_bytes(b"\xff\xfe\x00") and None, "config.yaml: "),
    "text for a time": ("metrics.jsonl", row(**{"clock/time": "now", "timers/step": "x"}), ""),
    "400 digits": ("metrics.jsonl", row(**{"train/loss": 10**400, "timers/step": 10**400}), ""),
    "a step of 10^30": ("metrics.jsonl", written(ROWS + json.dumps({"step": 10**30})), ""),
    "a list for a number": ("metrics.jsonl", row(**{"train/loss": [[1]] * 9}), ""),
    "steps of 10^400": ("config.yaml", written(f"algorithm:\n  max_steps: {10**400}"), ""),
    "text for a limit": ("config.yaml", written("run:\n  takeover_s: soon\ntrainer: 3"), ""),
}  # fmt: skip


def soon(work: Callable[[], Any]) -> Any:
    """What ``work`` returns, which must not hang."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(30)
    assert found, "it hangs, or has failed"
    return found[0]


def make_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(ROWS)
    (folder / "config.yaml").write_text("trainer:\n  max_steps: 3\ncentring: 0\n")
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_leaves_the_others_and_says_what_is_damaged(damage: str, tmp_path: Path) -> None:
    name, spoil, said = DAMAGES[damage]
    make_run(tmp_path / "good")
    spoil(make_run(tmp_path / "bad") / name)
    sources = Sources(Runs([tmp_path]))
    bad, good = soon(sources.list)["runs"]
    assert (good["step"], good["total_steps"], good["damaged"]) == (4, 3, [])
    assert [each for each in bad["damaged"] if said in each] or not said, bad
    for run in ("bad", "good"):
        json.dumps(soon(lambda run=run: sources.metrics(f"{tmp_path.name}/{run}", "")), allow_nan=False)
    soon(lambda: sources.config([f"{tmp_path.name}/{run}" for run in ("bad", "good")]))


def test_a_run_that_fails_as_nobody_foresaw_is_in_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "good")
    make_run(tmp_path / "bad")
    sources = Sources(Runs([tmp_path]))
    states = sources._states
    shown = type(states)._of
    monkeypatch.setattr(
        type(states), "_of", lambda self, run: {}["nothing"] if run.folder.name == "bad" else shown(self, run)
    )
    bad, good = sources.list()["runs"]
    assert good["step"] == 4 and bad["state"] == "damaged" and bad["damaged"] == ["KeyError: 'nothing'"]
    assert bad.keys() == good.keys()


@pytest.mark.parametrize("spoil", [pipe, link, written("{"), huge])
def test_a_damaged_tokenizer_leaves_a_run_without_texts(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    path = tmp_path / "rollouts" / "tokenizer.json"
    path.write_text("{}")
    spoil(path)
    assert soon(lambda: [load_tokenizer(tmp_path / "rollouts")]) == [None]


def test_files_that_are_no_samples_are_none(tmp_path: Path) -> None:
    """A name with a step of 10^30 would be searched step by step."""
    folder = make_run(tmp_path / "bad") / "rollouts"
    folder.mkdir()
    os.mkfifo(folder / "step_000001.parquet")
    (folder / f"steps_1_{10**30}.parquet").write_bytes(b"")
    (folder / "step_000002.parquet").write_bytes(b"PAR1damagedPAR1")
    (folder / "step_000003.parquet").write_bytes(b"")
    assert len(list_files(folder)) == 2
    sources = RolloutSources(Runs([tmp_path]))
    index = sources.index(f"{tmp_path.name}/bad")
    assert soon(lambda: index.refresh(20.0)) == (0, 0) and index.damaged == 2
