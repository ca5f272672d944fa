"""A reward model alone: its numbers, its door and what it refuses."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
import requests

from nemo_style_rlhf.critic_service.remote_critic import RemoteCritic
from nemo_style_rlhf.critic_service.remote_reward import RemoteRewardModel
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.common import TokenConfig
from nemo_style_rlhf.schema.reward import RewardServerConfig
from nemo_style_rlhf.schema.reward_server import RewardServerProcessConfig
from nemo_style_rlhf.wire import messages
from nemo_style_rlhf.wire.messages import ProtocolError
from nemo_style_rlhf.wire.secret import own_token
from tests.support.critic_server import CriticServer, agree, refusal, sequences, texts
from tests.support.models import save_reward_model
from tests.support.paths import ROOT
from tests.support.reward_server import RewardServer, plain_rewards

# --- numbers ----------------------------------------------------------------------------------------------------------


def test_rewards_are_those_of_the_critic_server_and_of_transformers(
    server: RewardServer, shared_server: CriticServer
) -> None:
    prompts, responses = texts(31, count=20)
    with RemoteRewardModel(server.config()) as alone, RemoteRewardModel(shared_server.config()) as beside_a_critic:
        rewards = alone.score_text(prompts, responses).result()
        np.testing.assert_array_equal(rewards, beside_a_critic.score_text(prompts, responses).result())
    np.testing.assert_allclose(rewards, plain_rewards(server.model, prompts, responses), atol=1e-5)
    assert len(np.unique(rewards)) == 20


def test_split_requests_keep_their_order(server: RewardServer) -> None:
    prompts, responses = texts(32, count=200)
    with RemoteRewardModel(server.config(max_request_bytes=4096)) as split:
        rewards = split.score_text(prompts, responses).result()
    np.testing.assert_allclose(rewards, plain_rewards(server.model, prompts, responses), atol=1e-5)


def test_a_text_that_is_too_long_is_refused_with_its_row(server: RewardServer) -> None:
    with (
        RemoteRewardModel(server.config()) as client,
        pytest.raises(ProtocolError, match=r"responses\[1\] make a sequence of"),
    ):
        client.score_text(["w1", "w1"], ["w2", "w2 " * 200]).result()


# --- status and refusals ----------------------------------------------------------------------------------------------


def test_the_status_says_that_there_is_no_critic(server: RewardServer, shared_server: CriticServer) -> None:
    with RemoteRewardModel(server.config()) as alone, RemoteRewardModel(shared_server.config()) as beside_a_critic:
        status, other = alone.status(), beside_a_critic.status()
    assert status.roles == ["reward"]
    assert (status.critic_step, status.last_committed, status.lease_holder) == (0, None, None)
    same = ("model_digest", "tokenizer_digest", "vocab_size", "max_length", "max_request_bytes")
    assert [getattr(status, name) for name in same] == [getattr(other, name) for name in same]


def test_the_critic_s_endpoints_do_not_exist(server: RewardServer) -> None:
    sentence = f"critic_infer at 127.0.0.1:{server.port}: this server has no such endpoint"
    with RemoteCritic(server.config()) as client, pytest.raises(ProtocolError, match=sentence):
        client.infer(sequences(1)).result()
    token = own_token()
    assert token is not None
    for endpoint in ("critic_infer", "critic_train", "critic_acquire", "critic_save", "critic_shutdown"):
        url = f"http://127.0.0.1:{server.port}/v2/models/{endpoint}/infer"
        answer = requests.post(url, json={"inputs": []}, headers={messages.TOKEN_HEADER: token}, timeout=10)
        assert (answer.status_code, answer.json()) == (404, {"error": "[not_found] this server has no such endpoint"})


def test_a_handshake_needs_a_critic(server: RewardServer, shared_server: CriticServer) -> None:
    with RemoteCritic(shared_server.config(port=server.port)) as critic:
        with pytest.raises(UserError, match=r"has no critic, it serves reward: start servers/serve_ppo_critic\.py and"):
            agree(critic, critic.status())


def test_a_token_is_wanted(letters: RewardServer) -> None:
    for token in (TokenConfig(), TokenConfig(token_file=f"{letters.output_dir}/wrong")):
        with RemoteRewardModel(letters.config(token=token)) as client:
            with pytest.raises(UserError, match=r"refused the token .* in reward\.server\.token\.token_file or"):
                client.score_text(["w1"], ["w2"]).result()


# --- life -------------------------------------------------------------------------------------------------------------


@pytest.mark.more
def test_a_dry_run_passes(tmp_path: Path, reward_model: Path) -> None:
    server = RewardServer(tmp_path, reward_model)
    done = subprocess.run(server.command("--dry-run"), cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "dry run passed: reward\n" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_model_with_two_labels_is_refused(tmp_path: Path) -> None:
    server = RewardServer(tmp_path / "server", save_reward_model(tmp_path / "two_labels", num_labels=2))
    done = subprocess.run(server.command(), cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "has 2 labels and label_weights are none: give it one number per label, " in done.stderr


def test_actor_and_server_agree_on_the_port() -> None:
    assert RewardServerProcessConfig().server.port == RewardServerConfig().port == 5568


def test_sigterm_ends_it_with_0(server: RewardServer) -> None:
    """The last test: it stops the module's server, which has written nothing."""
    assert server.terminate() == 0
    assert not server.ready_file.exists()
    assert not (server.output_dir / "outputs").exists()


@pytest.mark.more
def test_several_ranks_are_refused_in_one_sentence(reward_model: Path, tmp_path: Path) -> None:
    server = RewardServer(tmp_path, reward_model, [f"run.output_dir={tmp_path}/outputs"])
    environment = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    assert "a reward server is one rank, WORLD_SIZE is 2: start several servers" in refusal(
        server, environment=environment
    )
