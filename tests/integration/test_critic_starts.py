"""Critics that start elsewhere than from the reward model beside them, in real processes."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_style_rlhf.critic_service.remote_critic import CriticInference
from nemo_style_rlhf.models.scalar_loading import load_critic
from nemo_style_rlhf.schema.common import ModelConfig
from nemo_style_rlhf.wire.messages import Array
from tests.support.critic_server import CriticServer, refusal, sequences
from tests.support.metrics import metrics, without_timers
from tests.support.models import letter_tokenizer, save_policy, save_reward_model
from tests.support.ppo_runs import STEPS, actor_overrides, save_inputs
from tests.support.processes import Plug, proxy, run_pair, start_actor, start_server

REWARD = "def reward_func(queries, prompts, labels):\n    return [float(query.count('w1')) for query in queries]\n"
SERVER = ["model.dtype=float32", "run.num_threads=1", "engine.optim.lr=1e-3"]
NO_REWARD_MODEL = "reward_model.combine_rm_and_critic_server=false"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_inputs(tmp_path_factory.mktemp("inputs"))
    (folder / "reward.py").write_text(REWARD)
    return folder


@pytest.mark.more
def test_a_critic_from_the_policy_repeats_to_the_bit_after_both_were_killed(inputs: Path, tmp_path: Path) -> None:
    """PPO with a reward function: no reward model anywhere, and a new head that both starts of the server make alike."""
    server_settings = [*SERVER, f"model.path={inputs / 'policy'}", NO_REWARD_MODEL]
    settings = [*actor_overrides(inputs), "reward=function", f"reward.function.path={inputs / 'reward.py'}"]
    run_pair(tmp_path / "whole", server_settings, settings)
    plug, port, killed = Plug(), 0, tmp_path / "killed"
    (killed / "critic").mkdir(parents=True)
    with proxy(lambda: port, plug) as proxy_port:
        for moment in (("request", "critic_train", 8), ("response", "critic_save", 1), None):
            if moment:
                plug.arm(*moment)
            server, port = start_server(killed / "critic", *server_settings)
            actor = start_actor(killed / "actor", proxy_port, *settings)
            plug.processes = [server, actor]
            try:
                assert (actor.wait(240) == 0) == (moment is None), actor.output()
            finally:
                actor.kill()
                server.kill()
    assert "starts from" in server.output() and "with a new score head (run.seed=1234)" in server.output()
    rows = metrics(tmp_path / "whole" / "actor")
    assert without_timers(metrics(killed / "actor")) == without_timers(rows)
    assert [row["critic/loss"] > 0 for row in rows if "critic/loss" in row] == [True] * STEPS
    for pattern in ("actor/export/*.safetensors", "critic/exports/*/critic/*.safetensors"):
        whole, resumed = (sorted((tmp_path / run).glob(pattern))[-1] for run in ("whole", "killed"))
        assert whole.read_bytes() == resumed.read_bytes()


def served(server: CriticServer, tokens: list[Array]) -> CriticInference:
    server.start()
    try:
        with server.client() as client:
            return client.infer(tokens).result()
    finally:
        server.close()


def test_values_come_from_the_critics_path_and_rewards_from_the_reward_model(tmp_path: Path) -> None:
    reward, critic = save_reward_model(tmp_path / "reward"), save_reward_model(tmp_path / "critic", seed=7)
    tokens = sequences(5)
    apart = served(CriticServer(tmp_path / "apart", reward, [f"value_model.path={critic}"]), tokens)
    alone = served(CriticServer(tmp_path / "alone", reward), tokens)
    np.testing.assert_array_equal(apart.rewards, alone.rewards)
    model = load_critic(ModelConfig(str(critic), "float32"), seed=0)
    for ours, ids in zip(apart.values, tokens, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([ids.tolist()]), torch.ones(1, len(ids), dtype=torch.long))[0]
        np.testing.assert_allclose(ours, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            [],
            "is a causal LM \\(LlamaForCausalLM\\), no reward model: .*reward_model.combine_rm_and_critic_server=false",
        ),
        (
            ["reward_model.label_weights=[0,0]"],
            "reward_model.label_weights=\\[0.0, 0.0\\] is not possible: expected finite numbers that are not all 0",
        ),
    ],
)
def test_unsuitable_starts_are_refused_in_one_sentence(tmp_path: Path, overrides: list[str], sentence: str) -> None:
    server = CriticServer(tmp_path / "server", save_policy(tmp_path / "policy"), overrides)
    assert re.search(sentence, refusal(server))


@pytest.mark.more
def test_a_reward_model_of_another_tokenizer_is_served_elsewhere(tmp_path: Path) -> None:
    reward, other = save_reward_model(tmp_path / "reward"), save_reward_model(tmp_path / "other")
    letter_tokenizer().save_pretrained(other)
    server = CriticServer(tmp_path / "server", reward, [f"value_model.path={other}"])
    assert re.search(
        "have different tokenizers: serve the reward model with servers/serve_reward_model.py", refusal(server)
    )
