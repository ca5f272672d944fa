"""The critic server gives its devices to another part of the run, and takes them back."""

from concurrent.futures import CancelledError

import numpy as np
import pytest

from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.critic_service.remote_critic import RemoteCritic
from nemo_style_rlhf.critic_service.remote_reward import RemoteRewardModel
from nemo_style_rlhf.wire.connection import LeaseLost
from nemo_style_rlhf.wire.messages import Code, ProtocolError
from tests.support.critic_server import CriticServer, sequences, train_batch
from tests.support.metrics import without_clock


def values_of(critic: RemoteCritic) -> np.ndarray:
    return np.concatenate(critic.infer(sequences(1)).result().values or [])


def test_a_sleeping_critic_computes_nothing_and_says_who_wakes_it(
    shared_server: CriticServer, critic: RemoteCritic
) -> None:
    before = values_of(critic)
    assert not critic.status().asleep
    for _ in range(2):
        assert critic.sleep() > 0
        assert critic.status().asleep
    asked = [
        critic.infer(sequences(1)),
        critic.train(train_batch(1), step=1),
        RemoteRewardModel(shared_server.config()).score_text(["w1"], ["w2"]),
    ]
    for future in asked:
        with pytest.raises(ProtocolError, match=r"the critic sleeps .* its run wakes it \(critic_wake\)") as refused:
            future.result()
        assert refused.value.code is Code.CONFLICT
    assert critic.status().critic_step == 0
    for _ in range(2):
        assert critic.wake() > 0
    assert (values_of(critic) == before).all()
    critic.train(train_batch(1), step=1).result()  # the parts that were refused were not staged
    assert critic.status().critic_step == 1


def test_only_the_run_with_the_lease_puts_it_to_sleep_and_a_new_lease_finds_it_awake(
    shared_server: CriticServer, critic: RemoteCritic
) -> None:
    before = values_of(critic)
    with shared_server.client("another") as other:
        with pytest.raises(LeaseLost):
            critic.sleep()
        other.sleep()
        with pytest.raises(LeaseLost):
            critic.wake()
        assert other.status().asleep
        critic.acquire("test")  # as after a run in turns that was killed
        assert not critic.status().asleep and (values_of(critic) == before).all()


@pytest.mark.parametrize(("endpoint", "asleep"), [(protocol.SLEEP, False), (protocol.WAKE, True)])
def test_a_copy_that_a_network_delivers_late_changes_nothing(critic: RemoteCritic, endpoint, asleep: bool) -> None:
    late = {"lease": critic._lease, "request_id": f"of a {endpoint.name}"}
    critic._ask(endpoint, late)
    critic.sleep() if asleep else critic.wake()
    critic._ask(endpoint, late)
    assert critic.status().asleep is asleep
    critic.wake()


def test_checkpoints_are_the_same_asleep_and_awake(shared_server: CriticServer, critic: RemoteCritic) -> None:
    def goes_on() -> dict[str, float]:
        return without_clock(critic.train(train_batch(2), step=2).result())

    critic.train(train_batch(1), step=1).result()
    awake = critic.save("test-step_000001").result()
    critic.sleep()
    asleep = critic.save("test-step_000002", export=True).result()
    digests = [shared_server.checkpoint_digest(f"test-step_00000{step}") for step in (1, 2)]
    assert digests[0] == digests[1] and asleep["export"]
    critic.wake()
    wanted = goes_on()
    for name, saved in (("test-step_000001", awake), ("test-step_000002", asleep)):
        critic.sleep()
        assert critic.restore(name, saved["files"]) == 1
        assert critic.status().asleep
        critic.wake()
        assert goes_on() == wanted


def test_inference_that_is_asked_for_while_it_sleeps_is_sent_when_it_is_awake(critic: RemoteCritic) -> None:
    before = values_of(critic)
    critic.hold()
    critic.sleep()
    futures = [critic.infer(sequences(1)) for _ in range(4)]
    assert not any(future.done() for future in futures)
    critic.wake()
    critic.release()
    assert all((np.concatenate(future.result().values or []) == before).all() for future in futures)
    critic.hold()
    given_up = critic.infer(sequences(1))
    critic.forget_queued()
    with pytest.raises(CancelledError):
        given_up.result()
    assert (values_of(critic) == before).all()
