"""A reward model alone: its numbers, its door, what it refuses, and an actor that needs no other server."""

import json
import math
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import requests
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.critic_service.protocol import Array, ProtocolError
from nemo_style_rlhf.critic_service.remote_critic import RemoteCritic
from nemo_style_rlhf.critic_service.remote_reward import RemoteRewardModel
from nemo_style_rlhf.critic_service.secret import own_token
from nemo_style_rlhf.data.templates import write_template
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.common import TokenConfig
from nemo_style_rlhf.schema.reward import RewardServerConfig
from nemo_style_rlhf.schema.reward_server import RewardServerProcessConfig
from nemo_style_rlhf.scoring.combined import CombinedScorer
from nemo_style_rlhf.scoring.interface import RewardError, ScoringSample
from nemo_style_rlhf.scoring.remote import RewardServerScorer, served_by
from tests.support.critic_server import CriticServer, agree, refusal, sequences, texts
from tests.support.models import save_chat_tokenizer, save_policy, save_reward_model
from tests.support.paths import ROOT, SERVER_PYTHON
from tests.support.processes import proxy, start_actor

CHARACTERS = ["<end>", *" w0123456789"]


@dataclass
class RewardServer(CriticServer):
    """`servers/serve_reward_model.py` as a user starts it."""

    def command(self, *extra: str) -> list[str]:
        return [
            str(SERVER_PYTHON), "servers/serve_reward_model.py", f"model.path={self.model}", "model.dtype=float32",
            "run.num_threads=1", f"server.port={self.port}", f"server.ready_file={self.ready_file}", *self.overrides, *extra,
        ]  # fmt: skip

    def config(self, **changes: object) -> RewardServerConfig:
        return RewardServerConfig(**{"port": self.port, "retries": 0, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, reward_model: Path) -> Iterator[RewardServer]:
    """Serves the reward model of the shared critic server."""
    folder = tmp_path_factory.mktemp("reward_server")
    server = RewardServer(folder, reward_model, [f"run.output_dir={folder}/outputs"]).start()
    yield server
    server.close()


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardServer]:
    """Reads characters where the policy reads words; wants a token."""
    folder = tmp_path_factory.mktemp("letters")
    model = save_reward_model(folder / "model", seed=5, vocab_size=len(CHARACTERS), max_position_embeddings=256)
    tokenizer = Tokenizer(models.WordLevel({text: index for index, text in enumerate(CHARACTERS)}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<end>").save_pretrained(model)
    (folder / "token").write_text("open sesame\n")
    (folder / "wrong").write_text("open barley\n")
    server = RewardServer(folder, model, [f"server.token.token_file={folder}/token"]).start()
    yield server
    server.close()


def plain_rewards(model_dir: Path, prompts: list[str], responses: list[str]) -> Array:
    """What transformers says about prompt, response and end-of-text, one at a time."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForSequenceClassification.from_pretrained(model_dir).eval()
    rewards = []
    for prompt, response in zip(prompts, responses, strict=True):
        ids = [*tokenizer(prompt)["input_ids"], *tokenizer(response)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            rewards.append(float(model(torch.tensor([ids])).logits[0, 0]))
    return np.array(rewards, dtype=np.float32)


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
        answer = requests.post(url, json={"inputs": []}, headers={protocol.TOKEN_HEADER: token}, timeout=10)
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
    assert "has 2 labels, expected 1" in done.stderr


def test_actor_and_server_agree_on_the_port() -> None:
    assert RewardServerProcessConfig().server.port == RewardServerConfig().port == 5568


# --- with an actor ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def actor_overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    rows = [{"prompt": " ".join(f"w{(7 * i + j) % 62}" for j in range(2 + i % 5))} for i in range(30)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"model.path={save_policy(folder / 'policy')}", "model=fp32", f"data.train_path={folder / 'prompts.jsonl'}",
        "run.num_threads=1", "algorithm.max_steps=2", "algorithm.num_rollout_samples=16", "generation.max_length=8",
        "generation.kv_cache_gib=0.1",
    ]  # fmt: skip


def as_continued(response: str) -> str:
    """What a response's words add to the text of its prompt: no special tokens, a space before each word."""
    return "".join(f" {word}" for word in response.split() if word.startswith("w"))


def test_an_actor_without_a_critic_trains_on_its_rewards(
    letters: RewardServer, actor_overrides: list[str], tmp_path: Path
) -> None:
    """Nothing listens where the critic server would be."""
    where = [f"reward.server.port={letters.port}", f"reward.server.token.token_file={letters.output_dir}/token"]
    asked = ["reward=server", "algorithm=reinforce_pp", "data.prompt_template='w9 {prompt}'"]
    actor = start_actor(tmp_path, 9, *actor_overrides, *asked, *where)
    try:
        assert actor.wait(240) == 0, actor.output()
    finally:
        actor.kill()
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics][-2:] == [1, 2]
    assert all(math.isfinite(value) for row in metrics for value in row.values())
    for step in (1, 2):
        lines = (tmp_path / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
        rollout = [json.loads(line) for line in lines]
        assert len(rollout) == 16
        responses = [as_continued(row["response"]) for row in rollout]
        prompts = [row["prompt"].removeprefix("w9 ") for row in rollout]  # the template is the policy's alone
        expected = plain_rewards(letters.model, prompts, responses)
        np.testing.assert_allclose([row["reward"] for row in rollout], expected, atol=1e-5)


def scoring_samples(prompts: list[str], responses: list[str]) -> list[ScoringSample]:
    return [ScoringSample.of_texts(torch.zeros(0), *texts) for texts in zip(prompts, responses, strict=True)]


def scorer_of(config: RewardServerConfig) -> RewardServerScorer:
    return RewardServerScorer(config, served_by(config, lambda line: None))


def test_replicas_share_the_load_and_one_may_die_and_return_be_late_or_become_another(
    server: RewardServer, letters: RewardServer, reward_model: Path, tmp_path: Path
) -> None:
    replica = RewardServer(tmp_path, reward_model, []).start()
    asked = {"first": 0, "replica": 0}

    def count(name: str) -> Callable[[str, str], None]:
        def watch(direction: str, endpoint: str) -> None:
            asked[name] += (direction, endpoint) == ("request", "reward_infer")

        return watch

    prompts, responses = texts(33, count=40)
    samples, expected = scoring_samples(prompts, responses), plain_rewards(server.model, prompts, responses)
    behind = replica
    with proxy(lambda: server.port, count("first")) as one, proxy(lambda: behind.port, count("replica")) as two:
        config = server.config(port=one, replicas=[f"127.0.0.1:{two}"], cooldown_s=0.5, retries=3)
        scorer = scorer_of(config)

        def score() -> dict[str, int]:
            """How many of eight concurrent requests went where; all are answered, rightly."""
            asked.update(first=0, replica=0)
            groups = [scorer.score(samples[start : start + 5]) for start in range(0, 40, 5)]
            rewards = torch.cat([group.result().rewards for group in groups])
            np.testing.assert_allclose(rewards, expected, atol=1e-5)
            return dict(asked)

        try:
            assert min(score().values()) >= 2
            replica.kill()
            assert score()["first"] == 8
            scorer.close()
            scorer = scorer_of(config)
            assert score()["first"] == 8
            replica.port = 0
            replica.start()
            time.sleep(0.6)
            assert score()["replica"] >= 2
            behind = letters  # another model, which wants a token, too
            assert score()["first"] == 8
            behind = replica
            time.sleep(0.6)
            assert score()["replica"] >= 2
        finally:
            scorer.close()
            replica.close()


def test_samples_have_no_reward_when_no_server_answers(server: RewardServer) -> None:
    """Neither of them is the critic, whose absence would send the run back to its last checkpoint."""
    gone = False

    def watch(direction: str, endpoint: str) -> None:
        if gone:
            raise ConnectionError

    samples = scoring_samples(*texts(34, count=3))
    with proxy(lambda: server.port, watch) as one, proxy(lambda: server.port, watch) as two:
        for replicas in ([], [f"127.0.0.1:{two}"]):
            gone = False
            scorer = scorer_of(server.config(port=one, replicas=replicas))
            gone = True
            masking = CombinedScorer({"server": (scorer, 1.0)}, on_error="mask")
            stopping = CombinedScorer({"server": (scorer, 1.0)}, on_error="stop")
            assert masking.score(samples).result().failures.tolist() == [True, True, True]
            with pytest.raises(RewardError, match=r"no reward server answers at .*, or set reward\.on_error=mask"):
                stopping.score(samples).result()
            scorer.close()


def test_what_a_server_refuses_has_no_reward(server: RewardServer) -> None:
    """A response may be longer in the reward model's tokens than it takes."""
    scorer = scorer_of(server.config())
    with pytest.raises(RewardError, match=r"^reward_infer at 127.* a sequence of 202 tokens, expected 1\.\.128"):
        scorer.score(scoring_samples(["w1"], ["w2 " * 200])).result()
    scorer.close()


def test_texts_whose_reward_is_not_a_number_have_no_reward(tmp_path: Path) -> None:
    """A model one of whose embeddings is broken: other texts of the same request keep their rewards."""
    folder = save_reward_model(tmp_path / "broken")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.get_input_embeddings().weight.data[AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("w7")] = (
        math.nan
    )
    model.save_pretrained(folder)
    server = RewardServer(tmp_path / "server", folder).start()
    scorer = scorer_of(server.config())
    prompts, responses = ["w1", "w7", "w2", "w3"], [" w4", " w5", " w6", " w7 w8"]
    samples = scoring_samples(prompts, responses)
    try:
        scores = CombinedScorer({"server": (scorer, 1.0)}, on_error="mask").score(samples).result()
        assert scores.failures.tolist() == [False, True, False, True]
        np.testing.assert_allclose(
            scores.rewards[[0, 2]],
            plain_rewards(folder, [prompts[0], prompts[2]], [responses[0], responses[2]]),
            atol=1e-5,
        )
        with pytest.raises(
            RewardError, match=r"^the reward of reward\.server is nan for 2 of 4 samples, expected finite"
        ):
            CombinedScorer({"server": (scorer, 1.0)}, on_error="stop").score(samples).result()
    finally:
        scorer.close()
        server.close()


def test_a_replica_with_another_model_is_refused(letters: RewardServer, tmp_path: Path, reward_model: Path) -> None:
    token = f"{letters.output_dir}/token"
    server = RewardServer(tmp_path, reward_model, [f"server.token.token_file={token}"]).start()
    config = server.config(replicas=[f"127.0.0.1:{letters.port}"], token=TokenConfig(token))
    try:
        with pytest.raises(
            UserError, match=rf"the reward server at 127\.0\.0\.1:{letters.port} serves the model .* serve the same one"
        ):
            scorer_of(config)
    finally:
        server.close()


def test_rendered_prompts_are_read_as_they_stand_and_a_beginning_of_text_stands_once(tmp_path: Path) -> None:
    """The server's tokenizer opens a text with <unk>; prompts come with it, and without it."""
    save_chat_tokenizer(save_reward_model(tmp_path / "model", seed=7))
    server = RewardServer(tmp_path / "server", tmp_path / "model", []).start()
    try:
        with RemoteRewardModel(server.config()) as client:
            prompts, responses = ["<unk> w60 w1 w61", "w60 w1 w61"], [" w2 w3"] * 2
            (rendered, bare), (text, opened) = (
                client.score_text(prompts, responses, rendered=flag).result().tolist() for flag in (True, False)
            )
    finally:
        server.close()
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    ids = [1, *(2 + word for word in (60, 1, 61, 2, 3)), 0]
    with torch.no_grad():
        once, never = (float(model(torch.tensor([each])).logits[0, 0]) for each in (ids, ids[1:]))
    assert [rendered, bare, text, opened] == pytest.approx([once, never, once, once], abs=1e-5)
    assert abs(once - never) > 1e-3


def test_a_critic_server_whose_reward_model_had_another_template_is_refused(
    make_server: Callable[..., CriticServer], actor_overrides: list[str], reward_model: Path, tmp_path: Path
) -> None:
    """Its reward model reads the policy's tokens. The same server reads texts in its own template."""
    model = shutil.copytree(reward_model, tmp_path / "model")
    write_template(model, "{prompt} w9", AutoTokenizer.from_pretrained(model), append_eos=True)
    server = make_server(f"model.path={model}").start()
    with RemoteRewardModel(server.config()) as client:
        rewards = client.score_text(["w1", "w1 w9"], [" w2"] * 2).result()
    np.testing.assert_allclose(rewards, plain_rewards(model, ["w1 w9", "w1 w9 w9"], ["w2"] * 2), atol=1e-5)
    assert abs(rewards[0] - rewards[1]) > 1e-3
    actor = start_actor(tmp_path / "actor", server.port, *actor_overrides, "data.prompt_template='w5 {prompt}'")
    assert actor.wait(120) == 2, actor.output()
    sentence = (
        "error: data.prompt_template is 'w5 {prompt}' but the reward model of the critic server at "
        f"127.0.0.1:{server.port} was trained with '{{prompt}} w9' and reads the policy's tokens: "
    )
    assert sentence in actor.output()


def test_messages_are_not_sent_to_another_family(
    letters: RewardServer, actor_overrides: list[str], tmp_path: Path
) -> None:
    """Text prompts are, in the tests above."""
    save_chat_tokenizer(save_policy(tmp_path / "policy"))
    prompts = tmp_path / "messages.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "w1"}]}) + "\n")
    where = [f"reward.server.port={letters.port}", f"reward.server.token.token_file={letters.output_dir}/token"]
    asked = [f"model.path={tmp_path / 'policy'}", "data=messages", f"data.train_path={prompts}"]
    actor = start_actor(tmp_path, 9, *actor_overrides, "reward=server", "algorithm=reinforce_pp", *where, *asked)
    assert actor.wait(120) == 2, actor.output()
    sentence = (
        rf"error: the reward server at 127\.0\.0\.1:{letters.port} has the tokenizer \w{{16}}, the policy \w{{16}}: "
    )
    assert re.search(sentence, actor.output())


def test_an_actor_that_needs_a_critic_says_so(server: RewardServer, actor_overrides: list[str], tmp_path: Path) -> None:
    actor = start_actor(tmp_path, server.port, *actor_overrides)
    assert actor.wait(120) == 2, actor.output()
    sentence = f"error: the critic server at 127.0.0.1:{server.port} has no critic, it serves reward: start "
    assert sentence in actor.output()


def test_sigterm_ends_it_with_0(server: RewardServer) -> None:
    """The last test: it stops the module's server, which has written nothing."""
    assert server.terminate() == 0
    assert not server.ready_file.exists()
    assert not (server.output_dir / "outputs").exists()


def test_several_ranks_are_refused_in_one_sentence(reward_model: Path, tmp_path: Path) -> None:
    server = RewardServer(tmp_path, reward_model, [f"run.output_dir={tmp_path}/outputs"])
    environment = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    assert "a reward server is one rank, WORLD_SIZE is 2: start several servers" in refusal(
        server, environment=environment
    )
