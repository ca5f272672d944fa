"""A checkpoint is whole or it is not one."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from nemo_style_rlhf.checkpoint.files import file_digests, write_atomically
from nemo_style_rlhf.checkpoint.names import checkpoint_id
from nemo_style_rlhf.checkpoint.store import FOR_OTHERS, HF, CheckpointStore
from nemo_style_rlhf.errors import UserError
from tests.support.folders import make_unreadable, note_disk_calls


def save(store, step):
    with store.whole_or_absent(step):
        actor = store.begin(step)
        (actor / "w.bin").write_text(f"weights {step}")
        critic = {"checkpoint_id": checkpoint_id("run", step), "files": {}}
        store.commit(step, "run", critic=critic, state={"step": step}, versions={})
    return actor.parent


def test_latest_is_the_newest_whole_one(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    assert store.latest() is None
    save(store, 1)
    save(store, 2)
    manifest = store.latest()
    assert manifest is not None
    assert (manifest.step, manifest.state) == (2, {"step": 2})
    assert manifest.critic["checkpoint_id"] == checkpoint_id("run", 2) == "run-step_000002"


def test_an_attempt_that_died_before_its_manifest_does_not_count_and_can_be_repeated(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 1)

    def no_space():
        with store.whole_or_absent(2):
            (store.begin(2) / "w.bin").write_text("hal")
            raise OSError(28, "No space left on device")

    sentence = r"step 2 could not be saved .*\(disk full: .*\).* resumes from step 1"
    with pytest.raises(UserError, match=sentence):
        no_space()
    assert store.latest().step == 1
    save(store, 2)
    assert store.latest().step == 2


def resign(manifest, content):
    """As somebody who may write there can."""
    del content["digest"]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    manifest.write_text(json.dumps({**content, "digest": digest}))


@pytest.mark.parametrize(
    "damage", [lambda path: path.write_text("weights 3"), lambda path: path.unlink(), make_unreadable]
)
def test_a_damaged_one_falls_back_to_the_one_before_and_says_so(tmp_path, caplog, damage):
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 1)
    folder = save(store, 2)
    damage(folder / "actor" / "w.bin")
    assert store.latest().step == 1
    assert re.search(r"step_000002 is damaged \(actor/w.bin( is no plain file)?\)", caplog.text)


@pytest.mark.parametrize(
    "change", [shutil.rmtree, lambda part: (part / "model").unlink(), lambda part: (part / "more").write_text("x")]
)
def test_what_becomes_of_the_part_for_other_programs_does_not_matter(tmp_path, change):
    """But it goes with its checkpoint."""
    store = CheckpointStore(tmp_path, keep_last=1)
    part = store.begin(1).parent / HF
    part.mkdir()
    (part / "model").write_text("weights")
    store.commit(1, "run", critic={}, state={}, versions={})
    assert store.latest().files == {}
    change(part)
    assert store.latest().step == 1
    save(store, 2)
    store.prune(2)
    assert not part.parent.exists()


@pytest.mark.parametrize("place", ["surplus.pt", "engine/state/surplus.pt"])
def test_one_with_a_file_that_its_manifest_does_not_list_is_damaged(tmp_path, caplog, place):
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 1)
    surplus = save(store, 2) / "actor" / place
    surplus.parent.mkdir(parents=True, exist_ok=True)
    surplus.write_text("x")
    assert store.latest().step == 1
    assert f"step_000002 is damaged (actor/{place} is none of its files)" in caplog.text


@pytest.mark.parametrize("place", ["actor", "actor/w.bin", "manifest.json"])
def test_one_with_a_link_in_it_is_damaged_though_it_leads_to_the_same(tmp_path, caplog, place):
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2)
    save(store, 1)
    linked = save(store, 2) / place
    linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(tmp_path / "elsewhere")
    assert store.latest().step == 1
    assert re.search(rf"step_000002 is damaged \({place}\b", caplog.text)


def test_a_pipe_in_one_keeps_nobody_waiting(tmp_path, caplog):
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 1)
    path = save(store, 2) / "actor" / "w.bin"
    path.unlink()
    os.mkfifo(path)
    assert store.latest().step == 1
    assert "w.bin is no plain file" in caplog.text


def test_names_that_lead_out_of_one_are_not_followed(tmp_path, caplog):
    """The manifest's digest is right, and so is that of the file."""
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 1)
    path = save(store, 2) / "manifest.json"
    outside = tmp_path / "outside"
    outside.write_text("x")
    content = json.loads(path.read_text())
    content["files"]["../outside"] = hashlib.sha256(b"x").hexdigest()
    resign(path, content)
    assert store.latest().step == 1
    assert "step_000002 is damaged (../outside)" in caplog.text


@pytest.mark.parametrize("change", [{"run_id": "../x"}, {"run_id": 1}, {"step": 7}, {"files": []}, {"actor": []}])
def test_so_is_one_whose_manifest_is_of_something_else(tmp_path, caplog, change):
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 1)
    path = save(store, 2) / "manifest.json"
    resign(path, {**json.loads(path.read_text()), **change})
    assert store.latest().step == 1
    assert "step_000002 is damaged (manifest.json)" in caplog.text


@pytest.mark.parametrize("content", [b"", b'{"format": 1', b"[]", b"[" * 100_000, b'{"format": 1}', b"\xff\x00", None])
def test_so_does_one_whose_manifest_is_damaged(tmp_path, caplog, content):
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 1)
    manifest = save(store, 2) / "manifest.json"
    if content is None:
        make_unreadable(manifest)
    else:
        manifest.write_bytes(content)
    assert store.latest().step == 1
    assert "step_000002 is damaged (manifest.json)" in caplog.text


def test_where_all_are_damaged_nothing_starts_over(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (1, 2):
        (save(store, step) / "actor" / "w.bin").unlink()
    with pytest.raises(UserError, match=r"every checkpoint in .* is damaged \(steps 1, 2\): bring one back"):
        store.latest()


def test_a_checkpoint_of_another_format_is_not_taken_for_a_damaged_one(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    path = save(store, 1) / "manifest.json"
    written = json.loads(path.read_text())
    path.write_text(json.dumps({**written, "format": 2, "news": True, "digest": "of theirs"}))
    with pytest.raises(UserError, match="has format 2, this version reads 1"):
        store.latest()
    path.write_text(json.dumps({**written, "format": 3}))  # one bit, and the digest tells
    with pytest.raises(UserError, match=r"every checkpoint in .* is damaged"):
        store.latest()


def test_a_manifest_that_says_something_else_than_it_did_is_damaged(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    path = save(store, 1) / "manifest.json"
    written = json.loads(path.read_text())
    path.write_text(json.dumps({**written, "state": {"step": 3}}))
    with pytest.raises(UserError, match="damaged"):
        store.latest()


def test_what_a_run_has_gone_back_behind_does_not_count_as_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (1, 2, 5):
        save(store, step)
    store.prune(newest=2)
    assert store.committed_steps() == [1, 2, 5]


def test_what_could_not_be_restored_goes_once_the_run_has_passed_it_again(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (0, 1, 4):
        save(store, step)
    store.resume_from(0)
    save(store, 2)
    store.prune(newest=2)
    assert store.committed_steps() == [0, 2, 4]
    save(store, 4)
    store.prune(newest=4)
    assert store.committed_steps() == [2, 4]


def test_prune_keeps_the_last_committed_ones_and_clears_attempts_before_them(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (1, 2, 3):
        save(store, step)
    (tmp_path / "step_000000").mkdir()
    (tmp_path / "notes").mkdir()
    store.prune(newest=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step_000002", "step_000003"]


def test_parts_for_other_programs_are_not_even_hashed(tmp_path):
    for name in ("hf/model", "hf_adapter/model", "actor/hf", "hfx"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    hashed = []
    assert file_digests(tmp_path, lambda path: hashed.append(path.name) or "", besides=FOR_OTHERS) == {
        "actor/hf": "", "hfx": "",
    }  # fmt: skip
    assert hashed == ["hf", "hfx"]


def test_a_manifest_names_every_file_with_its_digest(tmp_path):
    folder = save(CheckpointStore(tmp_path, keep_last=1), 7)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["files"] == {"actor/w.bin": hashlib.sha256(b"weights 7").hexdigest()}


def test_every_folder_in_a_checkpoint_is_a_part_of_it(tmp_path, caplog):
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 1)
    with store.whole_or_absent(2):
        store.begin(2)
        store.part(2, "ahead").mkdir()
        (store.part(2, "ahead") / "batch.jsonl").write_text("{}")
        store.commit(2, "run", critic={}, state={}, versions={})
    assert store.latest().step == 2
    (store.part(2, "ahead") / "batch.jsonl").write_text("[]")
    assert store.latest().step == 1
    assert "step_000002 is damaged (ahead/batch.jsonl)" in caplog.text


def test_write_atomically_survives_a_kill_at_any_moment(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, b"a" * 1_000_000)
    script = (
        "import sys; from pathlib import Path; from nemo_style_rlhf.checkpoint.files import write_atomically\n"
        "print('go', flush=True)\n"
        "while True:\n"
        "    for byte in (b'b', b'a'): write_atomically(Path(sys.argv[1]), byte * 1_000_000)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE)
    child.stdout.readline()
    time.sleep(0.3)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    content = path.read_bytes()
    assert len(content) == 1_000_000
    assert len(set(content)) == 1


def test_an_older_checkpoint_is_deleted_once_the_name_of_the_newer_one_is_on_disk(tmp_path, monkeypatch):
    """Else a power cut could leave neither."""
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    first = save(store, 1)
    done = note_disk_calls(monkeypatch)
    second = save(store, 2)
    store.prune(newest=2)
    deleted = done.index(("deleted", first / "manifest.json"))
    renamed = len(done) - done[::-1].index(("flushed", second))  # with the name of its manifest
    for folder in (tmp_path, tmp_path / "checkpoints"):
        assert ("flushed", folder) in done[renamed:deleted]
    assert store.committed_steps() == [2]
