"""Rules 1 to 5 of the wire protocol, against the real server process."""

import http.server
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_style_rlhf.checkpoint.names import checkpoint_id
from nemo_style_rlhf.checkpoint.store import CheckpointStore
from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.critic_service.client import parse_json
from nemo_style_rlhf.critic_service.connection import LeaseLost, ServerRestarted
from nemo_style_rlhf.critic_service.protocol import Code, ProtocolError
from nemo_style_rlhf.critic_service.remote_critic import CriticTrainBatch, RemoteCritic
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.ppo.recovery import restore_newest
from nemo_style_rlhf.rollout.experience import require_one_critic_step
from nemo_style_rlhf.schema.remote_critic import RemoteCriticConfig
from nemo_style_rlhf.scoring.interface import Scores, ScoringSample
from nemo_style_rlhf.scoring.remote import RemoteCriticScorer
from tests.support.critic_server import START, CriticServer, agree, sequences, train_batch


def long_batch(optimizer_steps: int = 60) -> CriticTrainBatch:
    """Some seconds of training."""
    return train_batch(0, count=64, mini_batches=[list(range(64))] * optimizer_steps)


def wait_until_busy(critic: RemoteCritic) -> str:
    for _ in range(100):
        if (busy := critic.status().busy) and busy.startswith("train"):
            return busy
        time.sleep(0.02)
    raise AssertionError("the server never trained")


@pytest.fixture(scope="module")
def scratch_server(tmp_path_factory: pytest.TempPathFactory, reward_model: Path) -> Iterator[CriticServer]:
    """May be killed, frozen and restarted, if it serves again afterwards."""
    server = CriticServer(tmp_path_factory.mktemp("scratch_server"), reward_model).start()
    yield server
    server.close()


# --- rule 1: handshake first ------------------------------------------------------------------------------------------


def test_rule_1_handshake_refuses_other_tokenizers_and_vocabularies(shared_server: CriticServer) -> None:
    with RemoteCritic(shared_server.config()) as critic:
        status = critic.status()
        with pytest.raises(UserError, match=rf"has the tokenizer {status.tokenizer_digest[:16]}, the policy abcdef"):
            critic.handshake(tokenizer_digest="abcdef", vocab_size=status.vocab_size, needs_rewards=True)
        with pytest.raises(
            UserError, match=rf"127\.0\.0\.1:{shared_server.port} has a vocabulary of 64 ids, the policy 65"
        ):
            critic.handshake(tokenizer_digest=status.tokenizer_digest, vocab_size=65, needs_rewards=True)


def test_rule_1_handshake_refuses_another_protocol_version(
    shared_server: CriticServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RemoteCritic(shared_server.config()) as critic:
        status = critic.status()
        monkeypatch.setattr(protocol, "PROTOCOL_VERSION", 8)
        with pytest.raises(UserError, match="protocol version 7, this client 8"):
            agree(critic, status)


def test_rule_1_client_waits_for_a_loading_server(scratch_server: CriticServer) -> None:
    """The server is started again at the same port; the client asks before it has loaded."""
    scratch_server.terminate()
    scratch_server.spawn()
    lines: list[str] = []
    with RemoteCritic(scratch_server.config()) as critic:
        assert critic.wait_until_ready(lines.append).roles == ["critic", "reward"]
    assert f"127.0.0.1:{scratch_server.port}" in lines[0]


def test_rule_1_a_proxy_whose_server_is_away_is_waited_for() -> None:
    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_error(502)

    with http.server.HTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        config = RemoteCriticConfig(port=proxy.server_port, wait_for_server_s=0.1)
        with RemoteCritic(config) as critic:
            with pytest.raises(UserError, match=r"answers HTTP 502: start the critic server behind it, .* \(waited"):
                critic.wait_until_ready(lambda line: None)
        proxy.shutdown()


def test_rule_1_no_server_is_one_sentence_with_the_address() -> None:
    with RemoteCritic(RemoteCriticConfig(port=9, wait_for_server_s=0.0)) as critic:
        with pytest.raises(UserError, match=r"no critic server answers at 127\.0\.0\.1:9: start servers"):
            critic.wait_until_ready(lambda line: None)


def test_rule_1_status_answers_while_a_train_call_runs(critic: RemoteCritic) -> None:
    training = critic.train(long_batch(), step=1)
    busy = wait_until_busy(critic)
    started = time.monotonic()
    assert critic.status().critic_step == 0
    assert time.monotonic() - started < 1.0
    assert "train step 1" in busy
    training.result()
    assert critic.status().critic_step == 1


# --- what critic_infer computes ---------------------------------------------------------------------------------------


def test_an_answer_holds_what_was_wanted_and_nothing_else(critic: RemoteCritic) -> None:
    """The bits of values and rewards do not depend on whether the others were asked for."""
    both = critic.infer(sequences(1)).result()
    for want, names in (("values", {"values", "critic_step"}), ("rewards", {"rewards", "critic_step"})):
        answer = critic.infer(sequences(1), want=want).result()
        assert (answer.values is None, answer.rewards is None) == (want == "rewards", want == "values")
        if answer.values is not None:
            np.testing.assert_array_equal(np.concatenate(answer.values), np.concatenate(both.values))
        if answer.rewards is not None:
            np.testing.assert_array_equal(answer.rewards, both.rewards)
        inputs = protocol.infer_tensors(sequences(1), protocol.Wanted(want))
        assert set(critic._connection.call(protocol.INFER, inputs, timeout_s=60)) == names


def test_an_answer_comes_from_the_critic_step_that_is_expected(critic: RemoteCritic) -> None:
    critic.train(train_batch(1), step=1).result()
    expected = critic.infer(sequences(1), expect_critic_step=1).result()
    assert expected.critic_steps == {1}
    anyway = critic.infer(sequences(1)).result()
    np.testing.assert_array_equal(np.concatenate(anyway.values), np.concatenate(expected.values))
    for step, want in ((0, "both"), (2, "values"), (2, "rewards")):
        sentence = rf"request\.expect_critic_step is {step} but the critic is at step 1"
        with pytest.raises(ProtocolError, match=sentence) as refusal:
            critic.infer(sequences(1), want=want, expect_critic_step=step).result()
        assert refusal.value.code is Code.CONFLICT
    assert critic.status().critic_step == 1


def test_values_of_groups_that_two_critics_gave_are_no_rollout(critic: RemoteCritic) -> None:
    """A request each, with a train step between them."""

    def group(seed: int, scorer: RemoteCriticScorer) -> Scores:
        tokens = [torch.from_numpy(sequence.astype(np.int64)) for sequence in sequences(seed)]
        return scorer.score([ScoringSample.of_texts(row, "", "") for row in tokens]).result(60)

    both, rewards = RemoteCriticScorer(critic), RemoteCriticScorer(critic, want="rewards")
    before = [group(seed, scorer) for seed in (1, 2) for scorer in (both, rewards)]
    critic.train(train_batch(1), step=1).result()
    after = [group(1, both), group(1, rewards)]
    require_one_critic_step(Scores.joined([before[0], before[2]]).critic_steps)
    assert after[0].critic_steps == {1}
    with pytest.raises(UserError, match="the critic's values of one rollout are from its steps 0, 1: another run"):
        require_one_critic_step(Scores.joined([before[0], before[2], after[0]]).critic_steps)
    # The reward model is frozen: rewards alone are the same at any step.
    assert Scores.joined([before[1], after[1]]).critic_steps == frozenset()
    assert torch.equal(before[1].rewards, after[1].rewards) and torch.equal(before[0].rewards, after[1].rewards)
    assert after[1].values is None


# --- rule 2: one writer -----------------------------------------------------------------------------------------------


def test_rule_2_a_new_lease_invalidates_the_old_one(shared_server: CriticServer, critic: RemoteCritic) -> None:
    with shared_server.client("second") as second:
        for refused in (
            lambda: critic.train(train_batch(1), step=1).result(),
            lambda: critic.save("test-step_000009").result(),
            lambda: critic.commit(START, keep=100),
            lambda: critic.restore(START, None),
            critic.shutdown,
        ):
            with pytest.raises(LeaseLost, match="second"):
                refused()
        assert second.status().lease_holder == "second"
        assert second.status().critic_step == 0


def test_rule_2_running_work_ends_before_the_new_holder_may_begin(
    shared_server: CriticServer, critic: RemoteCritic
) -> None:
    training = critic.train(long_batch(), step=1)
    wait_until_busy(critic)
    with shared_server.client("second") as second:  # acquire() returns only when the train call has ended
        status = second.status()
        assert status.busy is None
        assert status.critic_step == 1
        assert training.result()["optimizer_steps"] == 60
        second.train(train_batch(2), step=2).result()


# --- rule 3: exactly once ---------------------------------------------------------------------------------------------


def parts_of(critic: RemoteCritic, step: int, parts: int = 2) -> list[dict]:
    """The requests of one train step, as the client would send them."""
    batch = train_batch(3, count=8)
    rows = np.array_split(np.arange(8), parts)
    arrays = [
        (
            *protocol.ragged([batch.sequences[row] for row in group]).values(),
            *(
                np.concatenate([field[row] for row in group])
                for field in (batch.returns, batch.old_values, batch.masks)
            ),
        )
        for group in rows
    ]
    normalizers = [sum(float(batch.masks[row].sum()) for row in rows) for rows in batch.mini_batches]
    requests = []
    for number in range(1, parts + 1):
        plan = protocol.part_plan(
            lease=critic._require_lease(),
            step=step,
            part=number,
            parts=arrays,
            mini_batches=batch.mini_batches,
            normalizers=normalizers,
        )
        tensors = (*arrays[number - 1], protocol.json_tensor(plan))
        requests.append({spec.name: tensor for spec, tensor in zip(protocol.TRAIN.inputs, tensors, strict=True)})
    return requests


def send(critic: RemoteCritic, request: dict) -> dict:
    return parse_json(critic._connection.call(protocol.TRAIN, request, timeout_s=60))


def test_rule_3_a_step_in_parts_equals_a_step_in_one(shared_server: CriticServer, critic: RemoteCritic) -> None:
    """The same metrics and the same bits of weights and optimizer state."""
    batch = train_batch(4, count=100)
    whole = critic.train(batch, step=1).result()
    critic.save("test-step_000001").result()
    critic.restore(START, None)
    with shared_server.client(max_request_bytes=8192) as splitting:
        in_parts = splitting.train(batch, step=1).result()
        splitting.save("test-step_000002").result()
    assert shared_server.checkpoint_digest("test-step_000002") == shared_server.checkpoint_digest("test-step_000001")
    assert {**in_parts, "seconds": 0} == {**whole, "seconds": 0}


def test_rule_3_repeated_parts_return_the_stored_answer_and_train_nothing(
    shared_server: CriticServer, critic: RemoteCritic
) -> None:
    first, second = parts_of(critic, step=1)
    assert send(critic, first) == {"staged": 1, "parts": 2}
    assert send(critic, first) == {"staged": 1, "parts": 2}
    assert critic.status().critic_step == 0
    answer = send(critic, second)
    critic.save("test-step_000001").result()
    assert send(critic, second) == answer
    assert send(critic, first) == answer
    assert critic.status().critic_step == 1
    critic.save("test-step_000002").result()
    assert shared_server.checkpoint_digest("test-step_000002") == shared_server.checkpoint_digest("test-step_000001")


def test_rule_3_a_step_that_does_not_follow_is_refused_with_both_numbers(critic: RemoteCritic) -> None:
    with pytest.raises(ProtocolError, match="train step 5 does not follow: the critic is at step 0") as refusal:
        critic.train(train_batch(1), step=5).result()
    assert refusal.value.code is Code.WRONG_STEP


def test_rule_3_incomplete_parts_are_dropped_with_the_lease(shared_server: CriticServer, critic: RemoteCritic) -> None:
    first, _ = parts_of(critic, step=1)
    send(critic, first)
    with shared_server.client("next") as successor:
        _, second = parts_of(successor, step=1)
        assert send(successor, second) == {"staged": 1, "parts": 2}


def test_rule_3_a_damaged_part_is_noticed_by_the_digest(critic: RemoteCritic) -> None:
    first, second = parts_of(critic, step=1)
    send(critic, {**first, "returns": first["returns"] + 1})
    with pytest.raises(ProtocolError, match="digest does not fit the 2 parts"):
        send(critic, second)
    assert critic.status().critic_step == 0
    send(critic, first)  # the damaged set is gone
    assert send(critic, second)["critic_step"] == 1


def test_rule_3_a_restarted_server_is_noticed(scratch_server: CriticServer) -> None:
    """An answer of the new process, which is back at the start, is never taken for one of the old."""
    server = scratch_server
    with server.client(retries=20) as critic:
        step = critic.status().critic_step + 1
        critic.train(train_batch(6), step=step).result()
        critic.save("test-step_000001").result()
        expected = critic.infer(sequences(1)).result()
        server.kill()
        waiting = critic.infer(sequences(1))  # sent while nobody listens
        server.start()
        with pytest.raises(ServerRestarted):
            waiting.result()
        with pytest.raises(ServerRestarted):
            critic.train(train_batch(7), step=step + 1).result()
        assert critic.acquire("test") == 0
        assert critic.restore("test-step_000001", None) == step
        restored = critic.infer(sequences(1)).result()
        np.testing.assert_array_equal(np.concatenate(restored.values), np.concatenate(expected.values))
        assert restored.critic_steps == {step}


# --- rule 4: paired commits -------------------------------------------------------------------------------------------


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
    assert [{**step, "seconds": 0} for step in again] == [{**step, "seconds": 0} for step in then]


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


# --- rule 5: nothing is lost in silence -------------------------------------------------------------------------------


def test_rule_5_timeouts_are_finite_and_a_retry_of_a_late_train_call_trains_once(scratch_server: CriticServer) -> None:
    """The server is frozen while it holds a train call; the client gives up, retries, and gets the one answer."""
    server = scratch_server
    with server.client(train_timeout_base_s=2.0, train_timeout_per_1k_tokens_s=0.0, retries=6) as critic:
        step = critic.status().critic_step + 1
        server.process.send_signal(signal.SIGSTOP)
        training = critic.train(train_batch(1), step=step)
        thaw = threading.Timer(5.0, lambda: server.process.send_signal(signal.SIGCONT))
        thaw.start()
        assert training.result()["optimizer_steps"] == 2
        assert critic.status().critic_step == step
    with server.client(infer_timeout_s=1.0, retries=1) as critic:
        server.process.send_signal(signal.SIGSTOP)
        with pytest.raises(UserError, match=rf"127\.0\.0\.1:{server.port} did not answer critic_infer within 1 s"):
            critic.infer(sequences(1)).result()
        server.process.send_signal(signal.SIGCONT)
