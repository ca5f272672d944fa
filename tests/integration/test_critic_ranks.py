"""Rule 9: a server of two ranks answers, learns and saves as one of one rank does."""

import signal
import time
from dataclasses import dataclass

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from nemo_style_rlhf.critic_service.remote_critic import RemoteCritic
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.wire.connection import ServerUnreachable
from nemo_style_rlhf.wire.messages import Array
from tests.support.critic_server import (
    START,
    CriticServer,
    left_of,
    long_batch,
    sequences,
    train_batch,
    wait_until_busy,
)
from tests.support.metrics import without_clock

STEPS = 3
SPLIT = "engine.micro_batch_tokens=100"
"""Of a step some mini-batches are then five micro-batches, for two ranks, and some inferences are one."""


@dataclass
class Learned:
    values: list[Array]
    """Before the first and after the last step."""
    rewards: Array
    metrics: list[dict[str, float]]
    weights: dict[str, torch.Tensor]


def learn(critic: RemoteCritic, server: CriticServer, *, turns: bool = False) -> Learned:
    """Three train steps from the untrained critic, and a checkpoint with an export. With ``turns`` the critic sleeps after each,
    and while it is saved."""

    def others_turn() -> None:
        if turns:
            critic.sleep()
            assert critic.status().asleep
            critic.wake()

    others_turn()
    first = critic.infer(sequences(1)).result()
    metrics = []
    for step in range(1, STEPS + 1):
        metrics.append(critic.train(train_batch(step, count=9), step=step).result())
        others_turn()
    last = critic.infer(sequences(1)).result()
    assert first.rewards is not None
    if turns:
        critic.sleep()
    critic.save("test-step_000001", export=True).result()
    if turns:
        critic.wake()
    weights = load_file(server.output_dir / "exports" / "test-step_000001" / "critic" / "model.safetensors")
    return Learned([np.concatenate(answer.values) for answer in (first, last)], first.rewards, metrics, weights)


@pytest.fixture(scope="module")
def alone(shared_server: CriticServer) -> Learned:
    with shared_server.client() as critic:
        critic.restore(START, None)
        return learn(critic, shared_server)


@pytest.mark.parametrize(
    ("zero_stage", "turns"),
    [
        (1, True),
        (3, False),
        *(pytest.param(*each, marks=pytest.mark.more) for each in [(0, True), (1, False), (2, True), (3, True)]),
    ],
)
def test_two_ranks_learn_what_one_learns(make_server, alone: Learned, zero_stage: int, turns: bool) -> None:
    server = make_server(f"engine.zero_stage={zero_stage}", SPLIT, ranks=2).start()
    with server.client() as critic:
        learned = learn(critic, server, turns=turns)
        np.testing.assert_allclose(learned.rewards, alone.rewards, atol=2e-6)
        for values, expected in zip(learned.values, alone.values, strict=True):
            np.testing.assert_allclose(values, expected, atol=1e-5)
        for metrics, expected in zip(learned.metrics, alone.metrics, strict=True):
            assert without_clock(metrics) == pytest.approx(without_clock(expected), rel=1e-4, abs=1e-5)
        assert learned.weights.keys() == alone.weights.keys()
        for name, weight in alone.weights.items():
            torch.testing.assert_close(learned.weights[name], weight, atol=1e-5, rtol=0, msg=name)

        critic.train(train_batch(7), step=STEPS + 1).result()
        further = critic.infer(sequences(2)).result().values
        critic.restore("test-step_000001", None)
        critic.train(train_batch(7), step=STEPS + 1).result()
        for values, again in zip(further, critic.infer(sequences(2)).result().values, strict=True):
            np.testing.assert_array_equal(values, again)
        children = psutil.Process(server.process.pid).children(recursive=True)
        critic.shutdown()
    assert server.process.wait(60) == 0, server.log.read_text()[-3000:]
    assert not left_of(children)


@pytest.mark.more
def test_a_rank_survives_a_full_disk_and_its_death_ends_the_server(make_server) -> None:
    """No call on the models is answered with half of the ranks."""
    server = make_server(SPLIT, "engine.zero_stage=1", ranks=2).start()
    with server.client(retries=1) as critic:
        critic.infer(sequences(1)).result()
        ranks = psutil.Process(server.process.pid).children()
        follower = max(ranks, key=lambda rank: rank.pid)
        follower.rlimit(psutil.RLIMIT_FSIZE, (4096, psutil.RLIM_INFINITY))
        with pytest.raises(UserError, match="could not be saved"):
            critic.save("test-step_000002").result()
        follower.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
        critic.save("test-step_000001").result()
        training = critic.train(long_batch(), step=1)
        wait_until_busy(critic)
        follower.send_signal(signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(ServerUnreachable):  # what the actor waits out, and goes back to the last checkpoint
            training.result()
        assert server.process.wait(60) != 0
        assert time.monotonic() - started < 40
    assert not left_of(ranks)


def test_a_dry_run_ends_all_ranks(make_server) -> None:
    dry = make_server("engine.zero_stage=3", "run.dry_run=true", ranks=2)
    assert dry.spawn().wait(120) == 0, dry.log.read_text()[-3000:]
    assert "dry run passed: critic and reward" in dry.log.read_text()
