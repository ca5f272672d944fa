"""Rules 3 and 4 where time does not run straight: copies of a request that come late, and train steps that are done again."""

import numpy as np
import pytest

from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.critic_service.client import parse_json
from nemo_style_rlhf.critic_service.remote_critic import RemoteCritic
from nemo_style_rlhf.wire.messages import Endpoint, ProtocolError
from tests.support.critic_server import START, CriticServer, sequences, train_batch


@pytest.fixture
def sent(critic: RemoteCritic, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Endpoint, dict]]:
    """What ``critic`` has asked for since, as it was sent."""
    requests: list[tuple[Endpoint, dict]] = []
    call = critic._connection.call

    def recorded(endpoint: Endpoint, inputs: dict, **options: float) -> dict:
        requests.append((endpoint, inputs))
        return call(endpoint, inputs, **options)

    monkeypatch.setattr(critic._connection, "call", recorded)
    return requests


def test_a_late_copy_of_an_acquire_does_not_take_the_lease(critic: RemoteCritic, sent: list) -> None:
    critic.acquire("again")
    (acquire,) = (request for request in sent if request[0] is protocol.ACQUIRE)
    lease = critic._lease
    assert parse_json(critic._connection.call(*acquire, timeout_s=60))["lease"] == lease
    critic.train(train_batch(1), step=1).result()
    critic.acquire("yetagain")
    assert parse_json(critic._connection.call(*acquire, timeout_s=60))["lease"] == lease != critic._lease
    critic.train(train_batch(2), step=2).result()


def test_a_late_copy_of_a_restore_does_not_undo_what_was_trained_since(critic: RemoteCritic, sent: list) -> None:
    assert critic.restore(START, None) == 0
    late = sent[-1]
    critic.train(train_batch(1), step=1).result()
    assert parse_json(critic._connection.call(*late, timeout_s=60)) == {"critic_step": 0}
    assert critic.status().critic_step == 1
    assert critic.restore(START, None) == 0 == critic.status().critic_step


def test_a_late_copy_of_a_commit_does_not_prune_the_checkpoint_after_it(
    shared_server: CriticServer, critic: RemoteCritic, sent: list
) -> None:
    critic.acquire("late")
    for name in ("late-step_000001", "late-step_000002"):
        critic.save(name).result()
        critic.commit(name, keep=1)
    first, last = (request for request in sent if request[0] is protocol.COMMIT)
    parse_json(critic._connection.call(*first, timeout_s=60))
    assert parse_json(critic._connection.call(*last, timeout_s=60)) == {"pruned": ["late-step_000001"]}
    assert critic.status().last_committed == "late-step_000002"
    assert (shared_server.output_dir / "checkpoints" / "late-step_000002" / "critic").exists()


def test_a_request_id_belongs_to_one_request(critic: RemoteCritic) -> None:
    request = {"lease": critic._lease, "checkpoint_id": START, "request_id": "mine"}
    critic._ask(protocol.RESTORE, request)
    with pytest.raises(ProtocolError, match=r"\[conflict\].*request_id mine was used before, with other content"):
        critic._ask(protocol.RESTORE, request | {"digests": {}})


@pytest.mark.more
def test_dropout_is_that_of_the_step_whoever_trains_it(make_server) -> None:
    """In the process that trained the steps before, back at a checkpoint, and in the next one."""
    server = make_server("model.lora.rank=4", "model.lora.dropout=0.5", "model.disable_dropout=false").start()

    def next_step(critic: RemoteCritic) -> np.ndarray:
        critic.train(train_batch(2), step=2).result()
        return np.concatenate(critic.infer(sequences(1)).result().values)

    with server.client() as critic:
        critic.train(train_batch(1), step=1).result()
        critic.save("test-step_000001").result()
        values = next_step(critic)
        critic.restore("test-step_000001", None)
        np.testing.assert_array_equal(next_step(critic), values)
        critic.restore("test-step_000001", None)
        critic.train(train_batch(3), step=2).result()
        critic.shutdown()
    server.process.wait(60)
    server.start()
    with server.client() as critic:
        critic.restore("test-step_000001", None)
        np.testing.assert_array_equal(next_step(critic), values)
