"""A critic checkpoint is whole, or the one before it is back."""

import errno
from pathlib import Path

import pytest

from nemo_style_rlhf.checkpoint.names import checkpoint_id
from nemo_style_rlhf.checkpoint.store import CheckpointStore
from nemo_style_rlhf.critic_service.store import REWARD_MODEL, CriticCheckpointStore
from nemo_style_rlhf.wire.messages import ProtocolError
from tests.support.folders import make_unreadable, note_disk_calls


def test_a_crash_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    store = CriticCheckpointStore(tmp_path)
    store.save("run-step_000001", 3, lambda directory: (directory / "weights").write_text("old"))
    (tmp_path / "checkpoints/run-step_000001/critic").rename(tmp_path / "checkpoints/run-step_000001/.critic.replaced")
    (tmp_path / "checkpoints/run-step_000001/critic.tmp").mkdir()
    directory, record = CriticCheckpointStore(tmp_path).verified("run-step_000001", None)
    assert record.critic_step == 3
    assert (directory / "weights").read_text() == "old"
    assert not (tmp_path / "checkpoints/run-step_000001/critic.tmp").exists()


def test_a_checkpoint_of_another_dtype_is_not_restored_whatever_its_ranks(tmp_path: Path) -> None:
    store = CriticCheckpointStore(tmp_path, {"model.dtype": "float32"})
    store.save("run-step_000001", 3, lambda directory: (directory / "weights").write_text("w"))
    with pytest.raises(ProtocolError, match=r"a critic with model\.dtype float32, this one has bfloat16"):
        CriticCheckpointStore(tmp_path, {"model.dtype": "bfloat16"}).verified("run-step_000001", None)
    assert store.verified("run-step_000001", None)[1].critic_step == 3


def test_a_record_that_lacks_what_this_version_compares_is_refused(tmp_path: Path) -> None:
    """All but the reward model, which a server may do without."""
    CriticCheckpointStore(tmp_path, {"rank": 2}).save("run-step_000001", 3, lambda directory: None)
    assert CriticCheckpointStore(tmp_path, {"rank": 2, REWARD_MODEL: "digest"}).verified("run-step_000001", None)
    with pytest.raises(
        ProtocolError, match=r"^\[conflict\] .* by another version, which did not record scale: resume with"
    ):
        CriticCheckpointStore(tmp_path, {"rank": 2, "scale": 1}).verified("run-step_000001", None)


def test_another_checkpoint_of_the_same_name_is_refused(tmp_path: Path) -> None:
    """A manifest names the files that its run has saved, by their digests; the server's folder may hold those of another run."""
    stores = [CriticCheckpointStore(tmp_path / name) for name in ("mine", "theirs")]
    mine, _ = (
        store.save(
            "run-step_000001", 3, lambda directory, number=number: (directory / "weights").write_text(f"{number}")
        )
        for number, store in enumerate(stores)
    )
    assert stores[0].verified("run-step_000001", mine.digests)
    with pytest.raises(ProtocolError, match=r"^\[conflict\] .* is not the one asked for: weights differ"):
        stores[1].verified("run-step_000001", mine.digests)


def test_after_a_fallback_both_sides_keep_the_same_checkpoints(tmp_path: Path) -> None:
    """Both prune the checkpoints that the run has gone back behind first, and not the last good ones before them."""
    critics, actors = CriticCheckpointStore(tmp_path / "server"), CheckpointStore(tmp_path / "actor", keep_last=3)

    def commit(step: int) -> None:
        critics.save(checkpoint_id("run", step), step, lambda directory: None)
        actors.begin(step)
        actors.commit(step, "run", critic={}, state={}, versions={})
        critics.commit(checkpoint_id("run", step), keep=3)
        actors.prune(step)

    for step in (10, 20, 30):
        commit(step)
    critics.commit(checkpoint_id("run", 20), keep=None)  # as a restore does, here because 30 is damaged
    actors.resume_from(20)
    commit(25)
    assert critics.committed == [checkpoint_id("run", step) for step in (10, 20, 25)]
    for step in (28, 35):
        commit(step)
    assert critics.committed == [checkpoint_id("run", step) for step in actors.committed_steps()]


def test_where_the_new_folder_cannot_take_its_place_the_old_one_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CriticCheckpointStore(tmp_path)
    store.save("run-step_000001", 1, lambda directory: (directory / "weights").write_text("old"))
    replace = Path.replace

    def refused(path: Path, target: Path) -> Path:
        if path.name == "critic.tmp":
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", refused)
    with pytest.raises(ProtocolError, match="make room"):
        store.save("run-step_000001", 2, lambda directory: (directory / "weights").write_text("new"))
    directory, record = store.verified("run-step_000001", None)
    assert record.critic_step == 1 and (directory / "weights").read_text() == "old"


def test_pruning_leaves_the_actors_checkpoint_alone(tmp_path: Path) -> None:
    store = CriticCheckpointStore(tmp_path)
    for name in ("run-step_000001", "run-step_000002"):
        store.save(name, 1, lambda directory: (directory / "weights").write_text("w"))
        (tmp_path / "checkpoints" / name / "manifest.json").write_text("{}")
        pruned = store.commit(name, keep=1)
    assert pruned == ["run-step_000001"]
    assert (tmp_path / "checkpoints/run-step_000001/manifest.json").exists()
    assert not (tmp_path / "checkpoints/run-step_000001/critic").exists()


def test_pruning_leaves_other_runs_alone(tmp_path: Path) -> None:
    store = CriticCheckpointStore(tmp_path)
    for name in ("old-step_000001", "new-step_000001", "new-step_000002"):
        store.save(name, 1, lambda directory: (directory / "weights").write_text("w"))
        pruned = store.commit(name, keep=1)
    assert pruned == ["new-step_000001"]
    assert CriticCheckpointStore(tmp_path).committed == ["old-step_000001", "new-step_000002"]
    assert store.verified("old-step_000001", None)


@pytest.mark.parametrize("name", ["weights", "critic.json"])
def test_a_half_that_cannot_be_read_is_damaged(tmp_path: Path, name: str) -> None:
    store = CriticCheckpointStore(tmp_path)
    store.save("run-step_000001", 1, lambda directory: (directory / "weights").write_text("w"))
    make_unreadable(tmp_path / "checkpoints" / "run-step_000001" / "critic" / name)
    with pytest.raises(ProtocolError, match=f"is damaged: {name}"):
        store.verified("run-step_000001", None)


def test_a_damaged_list_of_commits_keeps_no_server_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    CriticCheckpointStore(tmp_path).save("run-step_000001", 1, lambda directory: None)
    (tmp_path / "checkpoints" / "critic_committed.json").write_text('["run-st')
    store = CriticCheckpointStore(tmp_path)
    assert store.committed == [] and "critic_committed.json is damaged" in caplog.text
    store.commit("run-step_000001", keep=None)
    assert CriticCheckpointStore(tmp_path).committed == ["run-step_000001"]


def test_an_older_checkpoint_is_deleted_once_the_name_of_the_newer_one_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CriticCheckpointStore(tmp_path)
    store.save("run-step_000001", 1, lambda directory: None)
    done = note_disk_calls(monkeypatch)
    store.save("run-step_000002", 2, lambda directory: None)
    store.commit("run-step_000002", keep=1)
    renamed = done.index(("flushed", tmp_path / "checkpoints/run-step_000002"))
    deleted = done.index(("deleted", tmp_path / "checkpoints/run-step_000001/critic"))
    for folder in (tmp_path, tmp_path / "checkpoints"):
        assert ("flushed", folder) in done[renamed:deleted]
