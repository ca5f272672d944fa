"""What the critic server computes equals what plain transformers and torch compute."""

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from nemo_style_rlhf.critic_service.remote_critic import CriticTrainBatch, RemoteCritic
from nemo_style_rlhf.critic_service.remote_reward import RemoteRewardModel
from nemo_style_rlhf.data.supervised import load_pairs
from nemo_style_rlhf.models.loading import load_tokenizer
from nemo_style_rlhf.schema.supervised import PreferenceDataConfig
from nemo_style_rlhf.wire.messages import Array
from tests.support.critic_server import CriticServer, sequences, texts, train_batch
from tests.support.models import save_token_classifier

CLIP = 0.2
LEARNING_RATE = 1e-3
EPS = 1e-5
"""Above the rounding of a gradient: with Adam's usual 1e-8, rounding in a tiny gradient moves a weight by whole steps."""


def plain_values(model: torch.nn.Module, tokens: Array) -> torch.Tensor:
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    return model.score(model.base_model(input_ids=ids).last_hidden_state)[0, :, 0]


def test_rewards_are_the_logits_of_transformers(critic: RemoteCritic, reward_model: Path) -> None:
    """Sequences that end in end-of-text, which is the pad token too, included: pooling must be the same."""
    tokens = sequences(1, count=12)
    for sequence in tokens[::3]:
        sequence[-1] = 0
    answer = critic.infer(tokens).result()
    model = AutoModelForSequenceClassification.from_pretrained(reward_model).eval()
    with torch.no_grad():
        expected = [float(model(torch.from_numpy(s.astype(np.int64))[None]).logits[0, 0]) for s in tokens]
    assert answer.rewards is not None
    np.testing.assert_allclose(answer.rewards, expected, atol=2e-6)


def test_rewards_of_texts_are_the_logits_of_what_the_trainer_reads(
    shared_server: CriticServer, critic: RemoteCritic, reward_model: Path, tmp_path: Path
) -> None:
    """Also the very bits of critic_infer's rewards on these tokens."""
    prompts, responses = texts(21, count=12)
    rows = zip(prompts, responses, strict=True)
    lines = [json.dumps({"prompt": prompt, "chosen": response, "rejected": "w1"}) for prompt, response in rows]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    config = PreferenceDataConfig(train_path=str(tmp_path / "pairs.jsonl"))
    pairs, _ = load_pairs(config.train_path, config, load_tokenizer(str(reward_model)))
    with RemoteRewardModel(shared_server.config()) as client:
        rewards = client.score_text(prompts, responses).result()
    model = AutoModelForSequenceClassification.from_pretrained(reward_model).eval()
    with torch.no_grad():
        expected = [float(model(torch.tensor([pair.chosen])).logits[0, 0]) for pair in pairs]
    assert rewards.dtype == np.float32
    np.testing.assert_allclose(rewards, expected, atol=2e-6)
    same_tokens = critic.infer([np.array(pair.chosen, dtype=np.int32) for pair in pairs]).result()
    np.testing.assert_array_equal(rewards, same_tokens.rewards)


def test_split_texts_keep_their_order_and_need_no_lease(shared_server: CriticServer) -> None:
    prompts, responses = texts(22, count=200)
    with (
        RemoteRewardModel(shared_server.config()) as whole,
        RemoteRewardModel(shared_server.config(max_request_bytes=4096)) as split,
    ):
        expected, rewards = (client.score_text(prompts, responses).result() for client in (whole, split))
        assert whole.score_text([], []).result().shape == (0,)
    np.testing.assert_allclose(rewards, expected, atol=2e-6)
    assert len(np.unique(rewards)) > 190


def test_an_answer_does_not_depend_on_what_else_is_in_the_request(critic: RemoteCritic) -> None:
    tokens = sequences(2, count=9)
    together = critic.infer(tokens).result()
    alone = [critic.infer([sequence]).result() for sequence in tokens]
    for row, single in enumerate(alone):
        np.testing.assert_allclose(together.values[row], single.values[0], atol=2e-6)


def test_a_split_request_keeps_its_order(shared_server: CriticServer) -> None:
    tokens = sequences(3, count=200)
    with shared_server.client() as whole, shared_server.client(max_request_bytes=4096) as split:
        expected, answer = whole.infer(tokens).result(), split.infer(tokens).result()
    np.testing.assert_allclose(np.concatenate(answer.values), np.concatenate(expected.values), atol=2e-6)
    assert [len(values) for values in answer.values] == [len(sequence) for sequence in tokens]


def train_plainly(model: torch.nn.Module, batches: list[CriticTrainBatch]) -> list[float]:
    """The textbook loop: one sequence at a time, torch.optim.AdamW, gradient clipped to norm 1."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)
    losses = []
    for batch in batches:
        step_losses = []
        for rows in batch.mini_batches:
            count = sum(float(batch.masks[row].sum()) for row in rows)
            loss = torch.zeros(())
            for row in rows:
                values = plain_values(model, batch.sequences[row])
                old, target, mask = (
                    torch.from_numpy(field[row]) for field in (batch.old_values, batch.returns, batch.masks)
                )
                clipped = old + (values - old).clamp(-CLIP, CLIP)
                error = torch.maximum((values - target) ** 2, (clipped - target) ** 2)
                loss = loss + 0.5 * (error * mask).sum() / count
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step_losses.append(loss.item())
        losses.append(float(np.mean(step_losses)))
    return losses


def test_training_equals_a_plain_torch_loop(critic: RemoteCritic, reward_model: Path) -> None:
    """Losses and exported weights after three train steps of two optimizer steps each, fp32."""
    batches = [train_batch(seed) for seed in (11, 12, 13)]
    metrics = [critic.train(batch, step=step).result() for step, batch in enumerate(batches, start=1)]
    exported = critic.save("test-step_000001", export=True).result()["export"]
    model = AutoModelForSequenceClassification.from_pretrained(reward_model).eval()
    losses = train_plainly(model, batches)
    np.testing.assert_allclose([step["loss"] for step in metrics], losses, atol=1e-6)
    trained = AutoModelForSequenceClassification.from_pretrained(exported)
    for (name, expected), actual in zip(model.named_parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-6, rtol=0, msg=name)
    assert (
        AutoTokenizer.from_pretrained(exported).get_vocab() == AutoTokenizer.from_pretrained(reward_model).get_vocab()
    )
    assert metrics[0]["tokens"] == sum(mask.sum() for mask in batches[0].masks)
    assert metrics[0]["lr"] == LEARNING_RATE
    assert metrics[0]["seconds"] > 0 and metrics[0]["grad_norm"] > 0


@pytest.mark.parametrize("stage", [0, 2])
def test_a_token_classifiers_bias_is_served_trained_restored_and_exported(tmp_path: Path, stage: int) -> None:
    """As a reward model and as the critic that starts from it."""
    model_dir = save_token_classifier(tmp_path / "model", bias=0.5, pad_token_id=0)
    server = CriticServer(tmp_path / "server", model_dir, [f"engine.zero_stage={stage}"]).start()
    tokens, batch = sequences(4, count=5), train_batch(14)
    model = AutoModelForTokenClassification.from_pretrained(model_dir).eval()
    try:
        with server.client() as critic:
            answer = critic.infer(tokens).result()
            critic.save("test-step_000001").result()
            first = critic.train(batch, step=1).result()
            exported = critic.save("test-step_000002", export=True).result()["export"]
            critic.restore("test-step_000001", None)
            again = critic.train(batch, step=1).result()
            critic.restore("test-step_000002", None)
            restored = critic.infer(tokens).result()
    finally:
        server.close()
    with torch.no_grad():
        expected = [plain_values(model, sequence).numpy() for sequence in tokens]
    np.testing.assert_allclose(np.concatenate(answer.values), np.concatenate(expected), atol=2e-6)
    assert answer.rewards is not None
    np.testing.assert_allclose(answer.rewards, [values[-1] for values in expected], atol=2e-6)
    (loss,) = train_plainly(model, [batch])
    assert first["loss"] == pytest.approx(loss, abs=1e-6)
    assert again["loss"] == first["loss"]
    trained = AutoModelForTokenClassification.from_pretrained(exported)
    assert trained.score.bias.item() != 0.5
    for (name, wanted), actual in zip(model.named_parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(actual, wanted, atol=2e-6, rtol=0, msg=name)
    with torch.no_grad():
        values = [plain_values(model, sequence).numpy() for sequence in tokens]
    np.testing.assert_allclose(np.concatenate(restored.values), np.concatenate(values), atol=5e-6)


@pytest.mark.more
def test_training_in_bfloat16_learns(make_server) -> None:
    server = make_server("model.dtype=bfloat16", "engine.zero_stage=2").start()
    with server.client() as critic:
        losses = [critic.train(train_batch(5), step=step).result()["loss"] for step in range(1, 9)]
    assert losses[-1] < 0.9 * losses[0]


def test_both_backends_and_environments_have_the_same_bits(tmp_path: Path, reward_model: Path) -> None:
    found = set()
    for backend in ("pytriton", "native"):
        server = CriticServer(tmp_path / backend, reward_model, backend=backend).start()
        with closing(server), server.client() as critic:
            answer = critic.infer(sequences(1)).result()
            trained = critic.train(train_batch(2), step=1).result()
            critic.save("test-step_000001").result()
            numbers = [values.tobytes() for values in answer.values], answer.rewards.tobytes(), trained["loss"]
            found.add(str((numbers, server.checkpoint_digest("test-step_000001"))))
    assert len(found) == 1
