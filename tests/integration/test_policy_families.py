"""Policies by family: their numbers are transformers', and vLLM samples from them after a transfer of trained weights."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from nemo_style_rlhf.engine.process_group import init_distributed
from nemo_style_rlhf.launch.bootstrap import setup
from nemo_style_rlhf.schema.common import RunConfig
from tests.support.models import save_tokenizer
from tests.support.sampler_pair import Pair

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES, head_dim=32, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=32),
    "gemma2": Gemma2Config(**SIZES, head_dim=32, query_pre_attn_scalar=32),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=32, query_pre_attn_scalar=32),
    "phi3": Phi3Config(**SIZES),
    "olmo2": Olmo2Config(**SIZES),
    "granite": GraniteConfig(**SIZES),
    "smollm3": SmolLM3Config(**SIZES),
    "glm4": Glm4Config(**SIZES, head_dim=32),
    "gpt2": GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=2, n_positions=128, bos_token_id=0, eos_token_id=0),
    "gpt_neox": GPTNeoXConfig(**{key: value for key, value in SIZES.items() if key != "num_key_value_heads"}),
    "opt": OPTConfig(
        vocab_size=64, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=128,
        word_embed_proj_dim=64, pad_token_id=1, bos_token_id=2, eos_token_id=0,
    ),
    "falcon": FalconConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, bos_token_id=0, eos_token_id=0,
    ),
    "mixtral": MixtralConfig(**SIZES, head_dim=32, num_local_experts=4, num_experts_per_tok=2),
}  # fmt: skip


@pytest.fixture(scope="module")
def device() -> torch.device:
    device = setup(RunConfig(output_dir="unused", device="cpu"))
    init_distributed(device)
    return device


def save(path: Path, config: PreTrainedConfig) -> Path:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.mul_(2)  # peaked enough to tell weights apart
    model.save_pretrained(path)
    save_tokenizer(path)
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_are_transformers_and_vllm_agrees_after_a_transfer(
    tmp_path: Path, device: torch.device, family: str
) -> None:
    path = save(tmp_path, FAMILIES[family])
    pair = Pair(path, device, "vllm")
    ids = torch.arange(2, 26).reshape(2, 12) % 64
    mask = torch.ones(2, 12)
    mask[:, -1] = 0
    with torch.no_grad():
        ours = pair.engine(ids, mask).logprobs
        logits = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(ids).logits[:, :-1]
    plain = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).flatten()
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=0)
    for _ in range(2):
        pair.train()
        assert pair.publish() < 1e-3
        assert pair.gap(pair.sample()) < 1e-3
