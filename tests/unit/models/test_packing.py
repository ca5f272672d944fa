"""Packed models compute what padded ones do, or are refused."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    LlamaForSequenceClassification,
    MistralConfig,
    MptConfig,
    OPTConfig,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models import packing
from nemo_style_rlhf.models.packing import PACKED_ATTENTION, pack, require_packing
from nemo_style_rlhf.models.policy import PolicyModel
from nemo_style_rlhf.models.scalar import ScalarModel, sequence_scores
from tests.support.models import SHAPE

SMALL = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0}
CONFIGS = {
    "llama, grouped heads": lambda: LlamaConfig(**SMALL, intermediate_size=96, num_key_value_heads=2),
    "qwen2": lambda: Qwen2Config(**SMALL, intermediate_size=96, num_key_value_heads=4),
    "qwen3": lambda: Qwen3Config(**SMALL, intermediate_size=96, num_key_value_heads=2, head_dim=16),
    "mistral, window of 4": lambda: MistralConfig(
        **SMALL, intermediate_size=96, num_key_value_heads=2, sliding_window=4
    ),
    "gemma3, window of 4 in some layers": lambda: Gemma3TextConfig(
        **SMALL, intermediate_size=96, num_key_value_heads=2, head_dim=16, sliding_window=4
    ),
    "gpt2, absolute positions": lambda: GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=4, **SPECIAL),
    "gpt-neox": lambda: GPTNeoXConfig(**SMALL, intermediate_size=96, **SPECIAL),
    "opt": lambda: OPTConfig(**SMALL, ffn_dim=96, word_embed_proj_dim=64),
    "phi, partial rotary": lambda: PhiConfig(**SMALL, intermediate_size=96),
}
LENGTHS = torch.tensor([11, 3, 7, 1, 9])
IDS = torch.randint(1, 60, (5, 11), generator=torch.Generator().manual_seed(0))
INSIDE = torch.arange(11) < LENGTHS[:, None]


def models(config: PretrainedConfig, *attentions: str) -> list[torch.nn.Module]:
    made = []
    for attention in attentions:
        torch.manual_seed(0)
        made.append(AutoModelForCausalLM.from_config(config, attn_implementation=attention).double().eval())
        config = type(config)(**config.to_dict())  # a model keeps its config and writes into it
    return made


@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_and_gradients_are_those_of_padded_rows(name):
    actions = INSIDE.roll(-1, dims=1).long()
    actions[:, -1] = 0
    actions[0, 0:3] = 0
    results = []
    for model in models(CONFIGS[name](), "eager", PACKED_ATTENTION):
        logprobs = PolicyModel(model, temperature=0.7)(IDS, actions).logprobs
        logprobs.square().mean().backward()
        results.append([logprobs.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for padded, packed in zip(*results, strict=True):
        assert float((padded - packed).norm()) <= 1e-6 * max(float(padded.norm()), 1)


def test_scores_are_those_of_padded_rows():
    results = []
    for attention in ("eager", PACKED_ATTENTION):
        torch.manual_seed(0)
        model = ScalarModel(LlamaForSequenceClassification(LlamaConfig(**SHAPE, num_labels=1)).eval())
        if attention == PACKED_ATTENTION:
            model.hf.set_attn_implementation(attention)
            model = ScalarModel(model.hf)
        scores = model(IDS, INSIDE.long())
        results.append((scores[INSIDE], sequence_scores(scores, IDS, LENGTHS, None)))
    for padded, packed in zip(*results, strict=True):
        torch.testing.assert_close(padded, packed)


def test_what_is_not_asked_for_is_not_computed():
    wanted = torch.zeros_like(IDS)
    wanted[0, 4] = wanted[2, [0, 6]] = 1
    packed = pack(IDS, wanted)
    assert packed.inputs["input_ids"].tolist() == [[*IDS[0, :5].tolist(), *IDS[2, :7].tolist()]]
    assert packed.inputs["position_ids"].tolist() == [[*range(5), *range(7)]]
    assert packed.inputs["cu_seq_lens_q"].tolist() == [0, 5, 12]
    assert packed.select(wanted.bool()).nonzero().flatten().tolist() == [4, 5, 11]
    assert packed.scatter(torch.ones(12)).sum(1).tolist() == [5, 0, 7, 0, 0]


@pytest.mark.parametrize("config", [
    BloomConfig(vocab_size=64, hidden_size=64, n_layer=2, n_head=4),
    MptConfig(vocab_size=64, d_model=64, n_layers=2, n_heads=4, max_seq_len=64),
    Gemma2Config(**SMALL, intermediate_size=96, num_key_value_heads=2, head_dim=16),
], ids=["bloom", "mpt", "gemma2"])  # fmt: skip
def test_models_that_cannot_be_packed_are_refused(config):
    (model,) = models(config, PACKED_ATTENTION)
    with pytest.raises(UserError, match=r"set model\.packing=false"):
        require_packing(model)


def test_attention_sinks_which_packing_would_leave_out_are_refused():
    config = GptOssConfig(
        **SMALL, intermediate_size=96, num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2
    )
    (model,) = models(config, PACKED_ATTENTION)
    with pytest.raises(
        UserError, match=r"an attention of its own, which packing would change: set model\.packing=false"
    ):
        require_packing(model.float())  # no double precision for experts


def test_decoding_with_a_packed_model_is_refused():
    (model,) = models(CONFIGS["qwen2"](), PACKED_ATTENTION)
    cache = model(input_ids=IDS[:1], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="for training, not for decoding: 1 queries, 12 keys"):
        model(input_ids=IDS[:1, :1], past_key_values=cache)


@pytest.mark.parametrize(
    ("autocast", "given", "used"),
    [
        (True, [torch.float32, torch.float32, torch.bfloat16], torch.bfloat16),
        (True, [torch.float64] * 3, torch.float64),  # which autocast leaves alone
        (False, [torch.float32] * 3, torch.float32),
    ],
)
def test_queries_keys_and_values_get_the_dtype_of_autocast(autocast, given, used):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = list(packing._autocast(*(torch.zeros(1, dtype=dtype) for dtype in given)))
    assert [x.dtype for x in found] == [used] * 3
