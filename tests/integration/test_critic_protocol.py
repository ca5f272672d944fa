"""Rules 1, 2, 3 and 5 of the wire protocol, against the real server process."""

import http.server
import signal
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.critic_service.remote_critic import RemoteCritic
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.rollout.experience import require_one_critic_step
from nemo_style_rlhf.schema.remote_critic import RemoteCriticConfig
from nemo_style_rlhf.scoring.interface import Scores, ScoringSample
from nemo_style_rlhf.scoring.remote import RemoteCriticScorer
from nemo_style_rlhf.wire.connection import LeaseLost, ServerRestarted
from nemo_style_rlhf.wire.messages import Code, ProtocolError
from tests.support.critic_server import START, CriticServer, agree, long_batch, sequences, train_batch, wait_until_busy
from tests.support.metrics import without_clock
from tests.support.train_parts import parts_of, send

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


def test_rule_1_a_run_that_must_repeat_refuses_a_server_that_need_not(
    shared_server: CriticServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RemoteCritic(shared_server.config()) as critic:
        status = critic.status()
        assert status.repeatable  # on a CPU nobody has to ask for it
        named = {"tokenizer_digest": status.tokenizer_digest, "vocab_size": status.vocab_size, "needs_rewards": True}
        critic.handshake(**named, needs_bits=True)
        monkeypatch.setattr(critic, "status", lambda: replace(status, repeatable=False))
        critic.handshake(**named)
        with pytest.raises(UserError, match=r"run\.deterministic=true, but the critic server .* start it with run\."):
            critic.handshake(**named, needs_bits=True)


def test_rule_1_handshake_refuses_another_protocol_version(
    shared_server: CriticServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RemoteCritic(shared_server.config()) as critic:
        status = critic.status()
        spoken = protocol.PROTOCOL_VERSION
        monkeypatch.setattr(protocol, "PROTOCOL_VERSION", spoken + 1)
        with pytest.raises(UserError, match=f"protocol version {spoken}, this client {spoken + 1}"):
            agree(critic, status)


@pytest.mark.more
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
    assert critic.status().critic_step == 0 and not training.done()
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
    assert without_clock(in_parts) == without_clock(whole)


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
