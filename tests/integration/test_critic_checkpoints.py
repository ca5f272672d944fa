"""Rule 4 of the wire protocol, paired checkpoints, against the real server process."""

import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_style_rlhf.checkpoint.names import checkpoint_id
from nemo_style_rlhf.checkpoint.store import CheckpointStore
from nemo_style_rlhf.critic_service.remote_critic import RemoteCritic
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.ppo.recovery import restore_newest
from nemo_style_rlhf.wire.messages import Code, ProtocolError
from tests.support.critic_server import START, CriticServer, train_batch
from tests.support.metrics import without_clock


def test_rule_4_restore_is_exact_to_the_last_bit(shared_server: CriticServer, critic: RemoteCritic) -> None:
    """Weights, optimizer and schedule: the steps after a restore equal the steps that were made before."""
    critic.train(train_batch(1), step=1).result()
    saved = critic.save("test-step_000001").result()
    then = [critic.train(train_batch(seed), step=seed).result() for seed in (2, 3)]
    critic.save("test-step_000003").result()
    assert critic.restore("test-step_000001", saved["files"]) == 1
    again = [critic.train(train_batch(seed), step=seed).result() for seed in (2, 3)]
    critic.save("test-step_000004").result()
    assert (
        shared_server.checkpoint_digest("test-step_000004")
        == shared_server.checkpoint_digest("test-step_000003")
        != shared_server.checkpoint_digest("test-step_000001")
    )
    assert [without_clock(step) for step in again] == [without_clock(step) for step in then]


def test_rule_4_training_waits_for_the_copy_and_not_for_the_disk(
    make_server: Callable[..., CriticServer], tmp_path: Path
) -> None:
    slow = tmp_path / "slow"
    server = make_server(environment={"SLOW_DISK": str(slow), "SLOW_DISK_S": "2"}).start()
    with server.client() as critic:
        slow.touch()
        before = critic.save("test-step_000001", critic_step=0)
        critic.train(train_batch(1), step=1).result()
        assert not before.done()
        slow.unlink()
        assert before.result()["critic_step"] == 0
        critic.save("test-step_000002", critic_step=1).result()
        assert server.checkpoint_digest("test-step_000001") != server.checkpoint_digest("test-step_000002")
        assert critic.restore("test-step_000001", before.result()["files"]) == 0
        critic.save("test-step_000003").result()
        assert server.checkpoint_digest("test-step_000003") == server.checkpoint_digest("test-step_000001")


def test_rule_4_a_step_that_is_gone_cannot_be_saved(critic: RemoteCritic) -> None:
    critic.train(train_batch(1), step=1).result()
    with pytest.raises(ProtocolError, match="step 0 is to be saved but the critic is at step 1") as refusal:
        critic.save("test-step_000001", critic_step=0).result()
    assert refusal.value.code is Code.CONFLICT


def test_rule_4_a_run_may_leave_nothing_behind(scratch_server: CriticServer) -> None:
    dry, other = {checkpoint_id("dry", step) for step in (1, 2)}, checkpoint_id("other", 1)
    with scratch_server.client() as critic:
        for run, names in (("other", [other]), ("dry", sorted(dry))):
            critic.acquire(run)
            for name in names:
                critic.save(name, export=True).result()
                critic.commit(name, keep=2)
        for _ in range(2):  # as its answer may get lost
            critic.commit(max(dry), keep=0)
    for folder in ("checkpoints", "exports"):
        names = {path.name for path in (scratch_server.output_dir / folder).iterdir()}
        assert other in names and not dry & names


def test_rule_4_commit_keeps_the_last_ones(scratch_server: CriticServer) -> None:
    server = scratch_server
    with server.client() as critic:
        one, two, crashed, last = (checkpoint_id("test", step) for step in (11, 12, 13, 14))
        for name in (one, two, crashed, last):
            critic.save(name).result()
            if name != crashed:
                pruned = critic.commit(name, keep=2)
        assert {one, crashed} <= set(pruned)
        assert critic.status().last_committed == last
        assert critic.restore(two, None) == critic.status().critic_step
        with pytest.raises(ProtocolError, match=f"no checkpoint {one}") as refusal:
            critic.restore(one, None)
        assert refusal.value.code is Code.NOT_FOUND


def test_rule_4_a_critic_checkpoint_that_is_not_the_manifests_is_refused(
    shared_server: CriticServer, critic: RemoteCritic
) -> None:
    files = critic.save("test-step_000005").result()["files"]
    name = next(iter(files))
    with pytest.raises(ProtocolError, match="not the one asked for"):
        critic.restore("test-step_000005", {**files, name: "0" * 64})
    with (shared_server.output_dir / "checkpoints" / "test-step_000005" / "critic" / name).open("ab") as file:
        file.write(b"x")
    with pytest.raises(ProtocolError, match="damaged"):
        critic.restore("test-step_000005", files)
    (shared_server.output_dir / "checkpoints" / "test-step_000005" / "critic" / "critic.json").write_text('{"critic_st')
    with pytest.raises(ProtocolError, match=r"checkpoint test-step_000005 is damaged: critic.json"):
        critic.restore("test-step_000005", files)
    assert critic.restore(START, None) == 0


def test_rule_4_the_actor_falls_back_to_a_checkpoint_whose_critic_checkpoint_is_whole(
    shared_server: CriticServer, critic: RemoteCritic, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    critic.acquire("run")
    for step in (1, 2):
        store.begin(step)
        saved = critic.save(checkpoint_id("run", step)).result()
        store.commit(step, "run", critic=saved, state={}, versions={})
    checkpoints = shared_server.output_dir / "checkpoints"
    (checkpoints / checkpoint_id("run", 2) / "critic" / next(iter(saved["files"]))).write_bytes(b"x")
    restored = restore_newest(critic, store)
    assert restored is not None and restored.step == 1
    assert "is damaged" in caplog.text and "falling back to the checkpoint before it" in caplog.text
    shutil.rmtree(checkpoints / checkpoint_id("run", 1))
    critic.acquire("run")  # under the old lease the answer would be that of before
    with pytest.raises(UserError, match=r"no checkpoint can be restored: .* checkpoint run-step_000002 is damaged"):
        restore_newest(critic, store)


def test_rule_4_a_critic_checkpoint_that_was_removed_is_saved_again(
    shared_server: CriticServer, critic: RemoteCritic
) -> None:
    """A save that is repeated is not answered from memory then."""
    critic.acquire("run")
    first = critic.save("run-step_000001").result()
    critic.commit("run-step_000001", 0)
    assert not (shared_server.output_dir / "checkpoints" / "run-step_000001").exists()
    assert critic.save("run-step_000001").result() == first
    assert critic.restore("run-step_000001", first["files"]) == first["critic_step"]


def test_rule_4_a_full_disk_spares_the_last_good_checkpoint(scratch_server: CriticServer) -> None:
    """A file-size limit on the live process stands in for the full disk."""
    server = scratch_server
    with server.client() as critic:
        good = critic.save("test-step_000006").result()
        critic.train(train_batch(1), step=good["critic_step"] + 1).result()
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        for name in ("test-step_000006", "test-step_000007"):
            with pytest.raises(UserError, match="could not be saved") as refusal:
                critic.save(name).result()
            assert str(server.output_dir) not in str(refusal.value)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert critic.restore("test-step_000006", good["files"]) == good["critic_step"]
