"""A save that fails keeps nothing in memory, and what cannot be gone back to is said."""

import errno
import gc
import logging
import shutil
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nemo_style_rlhf.checkpoint.store import CheckpointStore
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.engine.snapshot import Snapshot
from nemo_style_rlhf.errors import StorageError, UserError
from nemo_style_rlhf.ppo.recovery import Recovery, restore_newest
from nemo_style_rlhf.ppo.saving import Saver
from nemo_style_rlhf.rollout.prefetched import Prefetched
from nemo_style_rlhf.schema.actor import CheckpointConfig
from nemo_style_rlhf.wire.connection import ServerRestarted

KEPT = CheckpointConfig(keep_last=2, max_failed_saves=2)


@pytest.fixture(autouse=True)
def _no_garbage_collection() -> Iterator[None]:
    """Which would free in time what references in a circle keep."""
    gc.disable()
    yield
    gc.enable()


def copied() -> tuple[Snapshot, "weakref.ref[torch.Tensor]"]:
    snapshot = Snapshot()
    snapshot.files[Path("state") / "model.pt"] = {"weight": torch.ones(4)}
    return snapshot, weakref.ref(snapshot.files[Path("state") / "model.pt"]["weight"])


def test_a_copy_that_cannot_be_written_is_let_go(tmp_path: Path) -> None:
    """Whoever writes keeps the error until it is asked for, and the error where it was raised."""
    (tmp_path / "state").write_text("in the way")
    snapshot, weight = copied()
    with ThreadPoolExecutor(1) as thread:
        failed = thread.submit(snapshot.write, tmp_path)
    assert isinstance(failed.exception(), FileExistsError)
    assert weight() is None


def test_so_is_one_whose_server_did_not_live_to_see_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gone: Future[dict] = Future()
    gone.set_exception(ServerRestarted("another process"))
    critic = SimpleNamespace(save=lambda *_, **__: gone)
    saver = Saver(KEPT, CheckpointStore(tmp_path, 2), critic, run_id="run", identity={})
    weights: list[weakref.ref[torch.Tensor]] = []

    def take() -> Snapshot:
        snapshot, weight = copied()
        weights.append(weight)
        return snapshot

    saver.save(SimpleNamespace(snapshot=take), 1, {}, ahead=Prefetched(), critic_step=1, export_critic=False)
    saver.abandon(at=1)
    assert "another process; the last checkpoint is not complete" in caplog.text
    assert weights[0]() is None


def test_a_manifest_waits_for_the_critics_checkpoint(tmp_path: Path) -> None:
    """A kill before the critic's files are on its disk leaves the checkpoint before this one as the newest."""
    written: Future[dict] = Future()
    committed: list[str] = []
    critic = SimpleNamespace(save=lambda *_, **__: written, commit=lambda name, keep: committed.append(name))
    store = CheckpointStore(tmp_path, keep_last=2)
    saver = Saver(KEPT, store, critic, run_id="run", identity={})
    saver.save(SimpleNamespace(snapshot=Snapshot), 1, {}, ahead=Prefetched(), critic_step=1, export_critic=False)
    assert saver._writing is not None and not wait([saver._writing], timeout=0.5).done
    assert store.committed_steps() == [] and committed == []
    described = {"critic_step": 1, "files": {"model.pt": "digest"}}
    written.set_result(described)
    saver.settle()
    manifest = store.latest()
    assert manifest is not None and manifest.critic == described and committed == ["run-step_000001"]


def test_a_full_disk_is_reported_once_it_has_refused_too_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(snapshot: Snapshot, directory: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = CheckpointStore(tmp_path, keep_last=2)
    saver = Saver(KEPT, store, None, run_id="run", identity={})

    def save(step: int) -> None:
        saver.save(SimpleNamespace(snapshot=Snapshot), step, {}, ahead=Prefetched(), critic_step=0, export_critic=False)

    save(1)
    saver.settle(at=1)
    with monkeypatch.context() as patch:
        patch.setattr(Snapshot, "write", refused)
        save(2)
        saver.settle(at=2)
        assert "steps that are not saved: 1; training goes on and saves anew after this step" in caplog.text
        assert saver.owed
        save(3)
        with pytest.raises(StorageError, match=r"step 3 could not be saved .* the run resumes from step 1$"):
            saver.settle(at=3)
    save(4)
    saver.settle(at=4)
    assert store.committed_steps() == [1, 4] and not saver.owed


def test_a_checkpoint_without_a_critics_half_is_not_resumed_with_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    store.begin(3)
    store.commit(3, "run", critic={}, state={}, versions={})
    with pytest.raises(UserError, match="step_000003 is of a run without a critic server"):
        restore_newest(SimpleNamespace(), store)


def test_a_server_that_belonged_to_another_run_is_taken_over_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its critic may be untouched: then nothing else tells whether that run still trains."""
    caplog.set_level(logging.WARNING)
    status = SimpleNamespace(critic_step=0, lease_holder="other")
    critic = SimpleNamespace(wait_until_ready=lambda *_: status, acquire=lambda run: 0, forget_queued=lambda: None)
    for run in ("mine", "other"):
        store = CheckpointStore(tmp_path / run, keep_last=2)
        recovery = Recovery(critic, store, Ranks(), run_id=run, output_dir=tmp_path)
        assert recovery.restore_critic() is None
        assert ("belonged to the run other" in caplog.text) == (run == "mine")
        caplog.clear()


def test_without_a_critic_of_its_own_a_run_asks_the_server_for_no_checkpoint(tmp_path: Path) -> None:
    """Not even for one that an earlier start saved there, with a critic that nothing trained."""
    store = CheckpointStore(tmp_path, keep_last=2)
    store.begin(3)
    store.commit(3, "run", critic={"critic_step": 0, "files": {"model.pt": "digest"}}, state={}, versions={})
    status = SimpleNamespace(critic_step=0, lease_holder=None)
    critic = SimpleNamespace(
        wait_until_ready=lambda *_: status,
        acquire=lambda run: 0,
        forget_queued=lambda: None,
        shake_hands_again=lambda: None,
    )
    recovery = Recovery(critic, store, Ranks(), run_id="run", output_dir=tmp_path, restores=False)
    manifest = recovery.restore_critic()
    assert manifest is not None and manifest.step == 3
    recovery.undo()


def test_a_folder_that_is_taken_away_while_it_is_written_to_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files that came before are gone, and the later ones must not look like all of them."""
    snapshot = Snapshot()
    snapshot.files |= {Path("state") / f"{name}.pt": {"weight": torch.ones(4)} for name in "ab"}
    save = torch.save

    def save_and_lose(state: object, target: Path) -> None:
        save(state, target)
        if target.name == "a.pt":
            shutil.rmtree(tmp_path / "half")

    monkeypatch.setattr(torch, "save", save_and_lose)
    (tmp_path / "half").mkdir()
    with pytest.raises(FileNotFoundError):
        snapshot.write(tmp_path / "half" / "engine")
    assert not (tmp_path / "half").exists()
