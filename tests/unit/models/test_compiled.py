"""Compiled forwards compute what they would without, and leave their code where the next start looks for it."""

import os

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from nemo_style_rlhf.models.compiled import compile_forward
from nemo_style_rlhf.models.policy import PolicyModel
from nemo_style_rlhf.models.scalar import ScalarModel

pytestmark = pytest.mark.more

TINY = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "pad_token_id": 0, "attn_implementation": "eager"}  # fmt: skip


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_policy_has_the_same_log_probabilities_and_gradients(home):
    torch.manual_seed(0)
    hf = LlamaForCausalLM(LlamaConfig(**TINY))
    batches = [torch.randint(97, (rows, length)) for rows, length in ((8, 16), (16, 24), (8, 8))]

    def computed(policy):
        results = []
        for tokens in batches:
            mask = (torch.arange(tokens.shape[1]) % 3 > 0).float().expand_as(tokens)
            logprobs = policy(tokens, mask).logprobs
            results += [logprobs.detach(), *torch.autograd.grad(logprobs.square().sum(), list(hf.parameters()))]
        return results

    plain = computed(PolicyModel(hf))
    compiled = computed(PolicyModel(hf, compile_backbone=True))
    for left, right in zip(compiled, plain, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)
    (folder,) = (home / "nemo_style_rlhf").glob("compiled-*")
    assert any(folder.rglob("*.so"))


def test_a_reward_model_gives_the_same_rewards(home):
    torch.manual_seed(0)
    model = ScalarModel(LlamaForSequenceClassification(LlamaConfig(**TINY, num_labels=1)))
    tokens = torch.randint(1, 97, (8, 16))
    with torch.no_grad():
        plain = model.rewards(tokens, torch.ones_like(tokens))
        compile_forward(model)
        torch.testing.assert_close(model.rewards(tokens, torch.ones_like(tokens)), plain, rtol=1e-5, atol=1e-6)


def test_a_home_that_cannot_be_written_to_leaves_torch_its_own_folder(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    compile_forward(layer := torch.nn.Linear(2, 2))
    assert layer(torch.ones(1, 2)).shape == (1, 2)
    assert str(tmp_path) not in os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
