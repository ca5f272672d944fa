"""value_model.enabled=false: the critic server of an algorithm without a critic, with the reward model alone."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import requests

from nemo_style_rlhf.critic_service.remote_critic import RemoteCritic
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.wire.messages import ProtocolError
from tests.support import ppo_runs
from tests.support.critic_server import CriticServer, sequences
from tests.support.metrics import metrics, without_timers
from tests.support.models import save_reward_model
from tests.support.processes import Process, start_actor, start_server, wait_for_output

NONE = "value_model.enabled=false"
STEPS = 3
ACTOR = [
    "model=fp32", "run.num_threads=1", "generation=hf", "engine.optim.lr=2e-3", "algorithm.num_rollout_samples=32",
    "algorithm.mini_batches=2", "generation.max_length=12", "checkpoint.save_interval=1", "remote_critic_rm.retries=1",
]  # fmt: skip
GRPO = ["algorithm=grpo", f"algorithm.max_steps={STEPS}"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ppo_runs.save_inputs(tmp_path_factory.mktemp("without_a_critic") / "inputs")


def serve(inputs: Path, folder: Path, *words: str) -> tuple[Process, int]:
    return start_server(
        folder / "critic", f"model.path={inputs / 'reward'}", "model.dtype=float32", "run.num_threads=1", *words
    )


def start(inputs: Path, folder: Path, port: int, *words: str) -> Process:
    data = [f"model.path={inputs / 'policy'}", f"data.train_path={inputs / 'train.jsonl'}"]
    return start_actor(folder / "actor", port, *ACTOR, *data, *words)


def run(inputs: Path, folder: Path, *server: str, actor: list[str] = GRPO) -> str:
    """A run of both processes to its end; returns the actor's output."""
    critic, port = serve(inputs, folder, *server)
    process = start(inputs, folder, port, *actor)
    try:
        assert process.wait(240) == 0, process.output()
    finally:
        process.kill()
        assert critic.terminate() == 0
    return process.output()


def learned(folder: Path) -> tuple[object, ...]:
    actor = folder / "actor"
    files = [*sorted((actor / "rollouts").glob("*.parquet")), actor / "export" / "model.safetensors"]
    return without_timers(metrics(actor)), [file.read_bytes() for file in files]


def manifests(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("actor/checkpoints/*/manifest.json"))]


def test_a_run_learns_the_same_with_and_without_an_idle_critic_which_nobody_saves_and_a_warning_names(inputs, tmp_path):
    said = {words: run(inputs, tmp_path / str(len(words)), *words) for words in ((), (NONE,))}
    idle, alone = tmp_path / "0", tmp_path / "1"
    assert learned(idle) == learned(alone)
    assert [words for words in said if "value_model.enabled=false" in said[words]] == [()]
    assert said[()].count("holds a critic, which algorithm.advantage_estimator=grpo does not use") == 1
    for folder in (idle, alone):
        assert not [*folder.glob("critic/checkpoints/*")]
        assert [each["critic"] for each in manifests(folder)] == [{}, {}]
    assert not (alone / "critic" / "checkpoints").exists()


def test_server_and_actor_are_killed_and_the_result_is_that_of_a_run_undisturbed(inputs, tmp_path):
    run(inputs, tmp_path / "undisturbed", NONE)
    folder = tmp_path / "killed"
    server, port = serve(inputs, folder, NONE)
    actor = start(inputs, folder, port, *GRPO)
    try:
        wait_for_output(actor, "GRPO 1/3")
        server.kill()
        wait_for_output(actor, "both processes go back")
        server, _ = serve(inputs, folder, NONE, f"server.port={port}")
        wait_for_output(actor, "GRPO 2/3")
        actor.kill()
        actor = start(inputs, folder, port, *GRPO)
        assert actor.wait(240) == 0, actor.output()
    finally:
        actor.kill()
        assert server.terminate() == 0
    assert "resumed from step" in actor.output()
    assert learned(folder) == learned(tmp_path / "undisturbed")


def test_checkpoints_that_hold_a_critic_are_resumed_without_one_but_not_the_other_way_round(inputs, tmp_path):
    ppo = ["algorithm=ppo", "algorithm.max_steps=1"]
    run(inputs, tmp_path, actor=ppo)
    assert all(each["critic"]["files"] for each in manifests(tmp_path))
    assert "resumed from step 1" in run(inputs, tmp_path, NONE, actor=GRPO)
    assert [row["step"] for row in metrics(tmp_path / "actor")] == [1, 2, 3]
    server, port = serve(inputs, tmp_path)
    back = start(inputs, tmp_path, port, "algorithm=ppo", "algorithm.max_steps=4")
    assert back.wait(120) == 2 and server.terminate() == 0
    assert "error: checkpoint step_000003 is of a run without a critic server" in back.output()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, reward_model: Path) -> Iterator[CriticServer]:
    server = CriticServer(tmp_path_factory.mktemp("alone"), reward_model, [NONE]).start()
    yield server
    server.close()


def shake_hands(critic: RemoteCritic, *, needs_critic: bool) -> None:
    status = critic.status()
    critic.handshake(
        tokenizer_digest=status.tokenizer_digest,
        vocab_size=status.vocab_size,
        needs_rewards=True,
        needs_critic=needs_critic,
    )


def test_it_gives_the_rewards_that_it_gives_beside_a_critic_and_nothing_of_a_critic(alone, shared_server):
    asked = sequences(5, count=9)
    with RemoteCritic(alone.config()) as critic, shared_server.client() as beside:
        status = critic.status()
        assert (status.roles, status.critic_step, status.max_staged_bytes, status.last_committed) == (
            ["reward", "tokens"], 0, 0, None,
        )  # fmt: skip
        shake_hands(critic, needs_critic=False)
        with pytest.raises(
            UserError, match=r"runs with value_model\.enabled=false but the algorithm needs a critic: start it"
        ):
            shake_hands(critic, needs_critic=True)
        rewards = critic.infer(asked, want="rewards").result().rewards
        np.testing.assert_array_equal(rewards, beside.infer(asked, want="rewards").result().rewards)
        with pytest.raises(
            ProtocolError, match=r"request\.want is both but this server has no critic: ask for rewards"
        ):
            critic.infer(asked).result()
        url = f"http://127.0.0.1:{alone.port}/v2/models/critic_train/infer"
        secret = Path("~/.config/nemo_style_rlhf/token").expanduser().read_text()
        assert requests.post(url, headers={"x-critic-token": secret}, data=b"{}", timeout=10).status_code == 404


def test_it_takes_turns(alone):
    with RemoteCritic(alone.config()) as critic:
        shake_hands(critic, needs_critic=False)
        critic.acquire("test")
        before = critic.infer(sequences(1), want="rewards").result().rewards
        assert critic.sleep() > 0
        with pytest.raises(ProtocolError, match="the critic sleeps"):
            critic.infer(sequences(1), want="rewards").result()
        critic.wake()
        np.testing.assert_array_equal(critic.infer(sequences(1), want="rewards").result().rewards, before)


def test_two_ranks_that_shard_the_reward_model_give_the_same_rewards(alone, make_server):
    server = make_server(NONE, "engine.zero_stage=3", ranks=2).start()
    with RemoteCritic(alone.config()) as one, RemoteCritic(server.config()) as two:
        shake_hands(two, needs_critic=False)
        found = [critic.infer(sequences(1, count=12), want="rewards").result().rewards for critic in (one, two)]
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)


def test_it_holds_six_bytes_less_for_each_parameter(tmp_path):
    """In bf16: the critic's weights and their fp32 masters, even before its first optimizer step."""
    model = save_reward_model(
        tmp_path / "large", hidden_size=512, intermediate_size=1024, num_hidden_layers=4, pad_token_id=0
    )
    resident = []
    for words in ([], [NONE]):
        server = CriticServer(tmp_path / f"server{len(words)}", model, ["model.dtype=bfloat16", *words]).start()
        with RemoteCritic(server.config()) as critic:
            critic.infer(sequences(1), want="rewards").result()
        resident.append(psutil.Process(server.process.pid).memory_info().rss)
        server.close()
    parameters = (model / "model.safetensors").stat().st_size // 4
    assert parameters > 10**7 and resident[0] - resident[1] > 0.8 * 6 * parameters, (resident, parameters)


def test_its_dry_run_passes_and_leaves_nothing(make_server):
    server = make_server(NONE, "--dry-run")
    assert server.spawn().wait(120) == 0, server.log.read_text()
    assert "dry run passed: reward and tokens" in server.log.read_text()
    assert list(server.output_dir.iterdir()) == [server.log]
