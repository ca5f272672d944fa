"""Chunked log-probabilities equal the naive ones, forward and gradient, and any causal LM's own logits."""

import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    Qwen2Config,
)

from nemo_style_rlhf.models import cpu_linear
from nemo_style_rlhf.models.logprobs import logits_logprobs, token_logprobs
from nemo_style_rlhf.models.packing import PACKED_ATTENTION
from nemo_style_rlhf.models.policy import PolicyModel


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.more)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [None, 50, 1])
def test_equal_to_the_naive_result_forward_and_gradient(temperature, chunk_tokens, compiled):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 128, 32, generator=generator, requires_grad=True)
    weight = (torch.randn(1000, 32, generator=generator) * 0.3).requires_grad_()
    token_ids = torch.randint(1000, (2, 128), generator=generator)
    upstream = torch.randn(2, 2, 128, generator=generator)
    ours = token_logprobs(
        hidden, weight, token_ids, temperature=temperature, with_entropy=True, chunk_tokens=chunk_tokens,
        compiled=compiled,
    )  # fmt: skip
    naive = logits_logprobs(hidden.double() @ weight.double().T, token_ids, temperature=temperature)
    for left, right in zip(ours, naive):
        torch.testing.assert_close(left, right.float(), rtol=1e-5, atol=1e-5)
    gradients = [
        torch.autograd.grad((result[0] * upstream[0] + result[1] * upstream[1]).sum(), (hidden, weight))
        for result in (ours, naive)
    ]
    for left, right in zip(*gradients):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.tensor([0.5, 1.0, 2.0])])
@pytest.mark.parametrize("chunk_tokens", [None, 1])
def test_a_token_that_cannot_be_drawn_has_no_part_in_the_entropy(temperature, chunk_tokens):
    """0 log 0 = 0, in value and gradient: a vocabulary of 7 of which two logits are -inf is one of 5."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.rand(3, 8, generator=generator) + 0.5
    weight = torch.randn(7, 8, generator=generator)
    weight[5:] = torch.finfo(torch.float32).min  # times the positive hidden state: -inf
    ids, found = torch.tensor([0, 4, 2]), []
    for rows in (7, 5):
        inputs = hidden.clone().requires_grad_(), weight[:rows].clone().requires_grad_()
        logits = (inputs[0] @ inputs[1].T).detach().requires_grad_()
        assert rows == 5 or (logits == -torch.inf).sum() == 6
        ours = token_logprobs(*inputs, ids, temperature=temperature, with_entropy=True, chunk_tokens=chunk_tokens)
        theirs = logits_logprobs(logits, ids, temperature=temperature)
        found.append(
            (*ours, *(grad[:5] for grad in torch.autograd.grad(ours[0].sum() + 3 * ours[1].sum(), inputs)),
             *theirs, torch.autograd.grad(theirs[0].sum() + 3 * theirs[1].sum(), logits)[0][:, :5])
        )  # fmt: skip
    for masked, without in zip(*found, strict=True):
        torch.testing.assert_close(masked, without, rtol=1e-5, atol=1e-5)


def test_large_logits_do_not_cancel_in_the_entropy():
    """logsumexp - sum p l is wrong by 1e-3 and negative in fp32 where the logits are some hundreds over the temperature."""
    hidden = 54 * torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) / 8**0.5
    weight = torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
    ids = torch.zeros(64, dtype=torch.long)
    _, entropy = token_logprobs(hidden, weight, ids, temperature=0.1, with_entropy=True)
    log_p = ((hidden @ weight.T) / 0.1).double().log_softmax(-1)
    assert entropy.min() >= 0
    torch.testing.assert_close(entropy.double(), -(log_p.exp() * log_p).sum(-1), rtol=0, atol=2e-4)


def test_equal_to_the_naive_result_at_a_vocabulary_of_128k():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 128, 16, generator=generator, requires_grad=True)
    weight = (torch.randn(128 * 1024, 16, generator=generator) * 0.3).requires_grad_()
    token_ids = torch.randint(128 * 1024, (2, 128), generator=generator)
    gradients = []
    for result in (
        token_logprobs(hidden, weight, token_ids, with_entropy=True, chunk_tokens=100),
        logits_logprobs(hidden @ weight.T, token_ids),
    ):
        gradients.append((*result, *torch.autograd.grad((result[0] + result[1]).mean(), (hidden, weight))))
    for left, right in zip(*gradients):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


def test_without_entropy_the_gradient_is_that_of_the_logprobs_alone():
    hidden = torch.randn(3, 8, requires_grad=True)
    weight = torch.randn(5, 8, requires_grad=True)
    ids = torch.tensor([0, 4, 2])
    torch.testing.assert_close(
        torch.autograd.grad(token_logprobs(hidden, weight, ids).sum(), (hidden, weight)),
        torch.autograd.grad(logits_logprobs(hidden @ weight.T, ids)[0].sum(), (hidden, weight)),
    )


SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "tied": Qwen2Config(**SMALL, num_key_value_heads=1, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=2, n_positions=64),
    # Its logits are soft-capped after the head: a bare matrix product would be wrong.
    "soft_capped": Gemma2Config(**SMALL, head_dim=16, num_key_value_heads=1, final_logit_softcapping=2.0),
    "capped_far_above": Gemma2Config(**SMALL, head_dim=16, num_key_value_heads=1, final_logit_softcapping=30.0),
    "scaled": CohereConfig(**SMALL, num_key_value_heads=1, logit_scale=0.5),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_policys_logprobs_are_those_of_its_logits_at_the_next_token(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data.mul_(3)  # far enough from uniform for capping to matter
    policy = PolicyModel(model, temperature=0.7)
    ids = torch.randint(1, 97, (3, 9))
    mask = (torch.rand(3, 9) < 0.6).float()
    mask[:, -1] = 0
    result = policy(ids, mask, with_entropy=True)
    logprobs = (model(ids).logits.float() / 0.7).log_softmax(-1)
    expected = logprobs[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)[mask[:, :-1].bool()]
    torch.testing.assert_close(result.logprobs, expected, rtol=1e-5, atol=1e-5)
    entropy = -(logprobs.exp() * logprobs).sum(-1)[mask.bool()]
    torch.testing.assert_close(result.entropy, entropy, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["eager", PACKED_ATTENTION])
def test_a_policy_whose_head_masks_vocabulary_has_its_entropy(attention):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL), attn_implementation=attention).eval()
    ids = torch.randint(1, 90, (3, 9))
    mask = torch.ones(3, 9)
    mask[:, -1] = 0
    logits = model.base_model(input_ids=ids).last_hidden_state @ model.lm_head.weight[:90].T
    logprobs = (logits[mask.bool()] / 0.7).log_softmax(-1)
    head = torch.nn.Linear(32, 97)
    head.weight = model.lm_head.weight
    head.bias.data.zero_()[90:] = -torch.inf
    model.lm_head = head
    result = PolicyModel(model, temperature=0.7)(ids, mask, with_entropy=True)
    torch.testing.assert_close(result.entropy, -(logprobs.exp() * logprobs).sum(-1), rtol=1e-5, atol=1e-5)
    result.entropy.sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_a_plain_head_is_known_where_its_products_are_rounded_otherwise(monkeypatch):
    """As bf16 products in fp32 are; a vocabulary this large has one that differs."""
    torch.manual_seed(0)
    config = LlamaConfig(**{**SMALL, "vocab_size": 32000, "hidden_size": 256, "num_attention_heads": 4})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for parameter in model.parameters():
        parameter.data.mul_(10 if parameter.dim() > 1 else 1)
    monkeypatch.setattr(cpu_linear, "CPU_EMULATES_BF16", True)
    cpu_linear.use_fp32_products(model)
    assert PolicyModel(model, temperature=1.0)._plain_head


def test_a_model_on_the_cpu_may_have_an_attention_that_knows_gpus_alone():
    """It becomes a policy before it is on its device."""

    def on_a_gpu(*_: object, **__: object) -> None:
        raise AssertionError("computed on the CPU")

    AttentionInterface.register("on_a_gpu", on_a_gpu)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL), attn_implementation="on_a_gpu").eval()
    policy = PolicyModel(model, temperature=1.0)
    assert policy._plain_head
    with pytest.raises(AssertionError, match="computed on the CPU"):
        policy(torch.ones(1, 3, dtype=torch.long), torch.tensor([[1.0, 1.0, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_is_followed_forward_and_backward(dtype):
    hidden = torch.randn(3, 8).to(dtype).requires_grad_()
    weight = torch.randn(5, 8, requires_grad=True)
    ids = torch.tensor([0, 4, 2])
    with torch.autocast("cpu", torch.bfloat16):
        loss = token_logprobs(hidden, weight, ids).sum()
    loss.backward()
    expected = torch.autograd.grad(token_logprobs(hidden.float(), weight, ids).sum(), (hidden, weight))
    assert (hidden.grad.dtype, weight.grad.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(weight.grad, expected[1], rtol=0.05, atol=0.1)
    torch.testing.assert_close(hidden.grad.float(), expected[0].float(), rtol=0.05, atol=0.1)


def test_no_token_at_all_gives_zero_gradients():
    hidden, weight = torch.randn(0, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.long)).sum().backward()
    assert not weight.grad.any()
