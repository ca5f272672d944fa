"""An actor, or its scorer, whose rewards come from reward servers and that needs no other server."""

import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from nemo_style_rlhf.critic_service.remote_reward import RemoteRewardModel
from nemo_style_rlhf.data.prompts import load_prompts
from nemo_style_rlhf.data.template_files import write_template
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.common import TokenConfig
from nemo_style_rlhf.schema.data import PromptDataConfig
from nemo_style_rlhf.schema.reward import RewardServerConfig
from nemo_style_rlhf.scoring.combined import CombinedScorer
from nemo_style_rlhf.scoring.interface import RewardError, ScoringSample
from nemo_style_rlhf.scoring.remote import RewardServerScorer, served_by
from tests.support.critic_server import CriticServer, texts
from tests.support.metrics import metrics, samples
from tests.support.models import save_chat_tokenizer, save_policy, save_reward_model
from tests.support.processes import proxy, start_actor
from tests.support.reward_server import RewardServer, plain_rewards


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
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows][-2:] == [1, 2]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    for step in (1, 2):
        rollout = samples(tmp_path, step)
        assert len(rollout) == 16
        responses = [as_continued(row["response"]) for row in rollout]
        prompts = [row["prompt"].removeprefix("w9 ") for row in rollout]  # the template is the policy's alone
        expected = plain_rewards(letters.model, prompts, responses)
        np.testing.assert_allclose([row["reward"] for row in rollout], expected, atol=1e-5)


def scoring_samples(prompts: list[str], responses: list[str]) -> list[ScoringSample]:
    return [ScoringSample.of_texts(torch.zeros(0), *texts) for texts in zip(prompts, responses, strict=True)]


def scorer_of(config: RewardServerConfig) -> RewardServerScorer:
    return RewardServerScorer(config, served_by(config, lambda line: None))


@pytest.mark.more
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


@pytest.mark.more
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


def test_conversations_are_rendered_by_the_reward_models_own_chat_template(tmp_path: Path) -> None:
    """Its tokenizer opens a text with <unk>, as its template does: that stands once. The policy's template is another."""
    save_chat_tokenizer(save_reward_model(tmp_path / "model", seed=7))
    save_chat_tokenizer(save_policy(tmp_path / "policy"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    tokenizer.chat_template = "{% for m in messages %} w50 {{ m.content }} w51{% endfor %}"
    turns = [{"role": "system", "content": "w9"}, {"role": "user", "content": "w1"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns}))
    config = PromptDataConfig(train_path="", format="messages")
    (prompt,), _ = load_prompts(str(tmp_path / "rows.jsonl"), config, tokenizer)
    sample = ScoringSample.of_texts(torch.tensor(prompt.token_ids), prompt.text, "w2 w3", chat=prompt.chat)
    server = RewardServer(tmp_path / "server", tmp_path / "model", []).start()
    try:
        scorer = RewardServerScorer(server.config(), served_by(server.config(), print, conversations=True))
        (reward,) = scorer.score([sample]).result().rewards.tolist()
        scorer.close()
    finally:
        server.close()
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    ids = [1, *(2 + word for word in (60, 9, 60, 1, 60, 2, 3))]
    with torch.no_grad():
        expected = float(model(torch.tensor([ids])).logits[0, 0])
    assert reward == pytest.approx(expected, abs=1e-5)


def test_a_reward_model_without_a_chat_template_is_refused_before_the_first_rollout(server: RewardServer) -> None:
    with pytest.raises(UserError, match=r"reads no conversations of several turns, which the prompts are: serve"):
        served_by(server.config(), print, conversations=True)


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


def test_questions_reach_a_reward_model_of_another_family_as_words(
    letters: RewardServer, actor_overrides: list[str], tmp_path: Path
) -> None:
    """The policy's tokenizer and its chat template, whose markup no other model knows, are its own."""
    save_chat_tokenizer(save_policy(tmp_path / "policy"))
    prompts = tmp_path / "messages.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "w1"}]}) + "\n")
    where = [f"reward.server.port={letters.port}", f"reward.server.token.token_file={letters.output_dir}/token"]
    asked = [f"model.path={tmp_path / 'policy'}", "data=messages", f"data.train_path={prompts}"]
    actor = start_actor(tmp_path, 9, *actor_overrides, "reward=server", "algorithm=reinforce_pp", *where, *asked)
    assert actor.wait(120) == 0, actor.output()
    rollouts = samples(tmp_path)
    responses = [as_continued(rollout["response"]) for rollout in rollouts]
    expected = plain_rewards(letters.model, ["w1"] * len(responses), responses)
    np.testing.assert_allclose([rollout["reward"] for rollout in rollouts], expected, atol=1e-4)


def test_an_actor_that_needs_a_critic_says_so(server: RewardServer, actor_overrides: list[str], tmp_path: Path) -> None:
    actor = start_actor(tmp_path, server.port, *actor_overrides)
    assert actor.wait(120) == 2, actor.output()
    sentence = f"error: the critic server at 127.0.0.1:{server.port} has no critic, it serves reward: start "
    assert sentence in actor.output()
