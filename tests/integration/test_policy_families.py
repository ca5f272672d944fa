"""Policies by family: their numbers are transformers', and the generator samples from them after a transfer of trained weights.

docs/models.md lists the families; tests/unit/models/test_models_page.py holds the page against the tables here.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
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
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.generation.factory import require_supported
from nemo_style_rlhf.launch.bootstrap import setup
from nemo_style_rlhf.models.export import export_model
from nemo_style_rlhf.models.loading import load_causal_lm
from nemo_style_rlhf.models.lora import add_lora, merge_adapter, save_adapter
from nemo_style_rlhf.models.policy import PolicyModel
from nemo_style_rlhf.schema.common import LoRAConfig, ModelConfig, RunConfig
from nemo_style_rlhf.schema.generation import GenerationConfig
from tests.support.models import save_tokenizer
from tests.support.sampler_pair import Pair

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    **SIZES, "num_key_value_heads": 2, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
    "v_head_dim": 32, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
"""Multi-head latent attention, a dense layer, and experts with a shared one."""
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
    "deepseek_v2": DeepseekV2Config(**LATENT),
    "deepseek_v3": DeepseekV3Config(**LATENT),
}  # fmt: skip
WITHOUT_KERNELS = ("deepseek_v2", "deepseek_v3")
"""vLLM on CPUs cannot compute their attention: generation.backend=hf."""
WITHOUT_PACKING = {"gemma2": "caps its attention logits", "falcon": "has attention classes of its own"}

IDS = torch.arange(2, 26).reshape(2, 12)
MASK = torch.ones(2, 12)
MASK[0, 11:] = MASK[1, 7:] = 0


@pytest.fixture(scope="module")
def device() -> torch.device:
    device = setup(RunConfig(output_dir="unused", device="cpu"))
    init_distributed(device)
    return device


@pytest.fixture(autouse=True)
def own_groups() -> None:
    """vLLM keeps its groups for the next model of a process, but makes one of experts only for a model that has some."""
    from vllm.distributed import destroy_model_parallel

    destroy_model_parallel()


def save(path: Path, config: PreTrainedConfig) -> Path:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.mul_(2)  # peaked enough to tell weights apart
    model.save_pretrained(path)
    save_tokenizer(path)
    return path


def logprobs(path: Path, **settings: object) -> Tensor:
    """Log-probabilities of the actions in MASK, without a gradient."""
    with torch.no_grad():
        return PolicyModel(load_causal_lm(ModelConfig(str(path), "float32", **settings)), temperature=1.0)(IDS, MASK)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_are_transformers_and_the_generator_agrees_after_a_transfer(
    tmp_path: Path, device: torch.device, family: str
) -> None:
    path = save(tmp_path, FAMILIES[family])
    pair = Pair(path, device, "hf" if family in WITHOUT_KERNELS else "vllm")
    with torch.no_grad():
        ours = pair.engine(IDS, MASK).logprobs
        logits = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(IDS).logits[:, :-1]
    plain = logits.log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]
    torch.testing.assert_close(ours, plain[MASK[:, :-1].bool()], atol=1e-5, rtol=0)
    for _ in range(2):
        pair.train()
        assert pair.publish() < 1e-3
        assert pair.gap(pair.sample()) < 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_numbers_are_the_same_or_packing_is_refused(tmp_path: Path, family: str) -> None:
    path = save(tmp_path, FAMILIES[family])
    if family in WITHOUT_PACKING:
        with pytest.raises(UserError, match=f"{WITHOUT_PACKING[family]}.*set model.packing=false"):
            logprobs(path, packing=True)
    else:
        torch.testing.assert_close(logprobs(path, packing=True), logprobs(path), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_learn_and_merge(tmp_path: Path, family: str) -> None:
    path = save(tmp_path / "policy", FAMILIES[family])
    given = ModelConfig(str(path), "float32", lora=LoRAConfig(rank=4))
    hf = load_causal_lm(given)
    add_lora(hf, given)
    policy = PolicyModel(hf, temperature=1.0)
    before = policy(IDS, MASK).logprobs.mean()
    optimizer = torch.optim.Adam([each for each in hf.parameters() if each.requires_grad], lr=0.02)
    for _ in range(3):
        (-policy(IDS, MASK).logprobs.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    learned = policy(IDS, MASK).logprobs.detach()
    assert learned.mean() > before + 0.1
    save_adapter(hf, tmp_path / "adapter", given)
    merge_adapter(str(tmp_path / "adapter"), tmp_path / "merged")
    export_model(hf, tmp_path / "export", source=str(path))
    for folder in ("merged", "export"):
        torch.testing.assert_close(logprobs(tmp_path / folder), learned, atol=1e-4, rtol=0)


def test_adapters_of_a_model_with_experts_reach_vllm(tmp_path: Path, device: torch.device) -> None:
    path = save(tmp_path, FAMILIES["qwen3_moe"])
    pair = Pair(path, device, "vllm", lora=LoRAConfig(rank=4))
    first = pair.sample()
    for _ in range(2):
        pair.train()
        assert pair.publish() < 1e-3
        assert pair.gap(pair.sample()) < 1e-3
    assert pair.gap(first) > 0.01  # the adapters have learned


@pytest.mark.parametrize("family", WITHOUT_KERNELS)
def test_latent_attention_is_refused_before_vllm_starts(tmp_path: Path, family: str) -> None:
    path = save(tmp_path, FAMILIES[family])
    hf = load_causal_lm(ModelConfig(str(path), "float32"))
    with pytest.raises(UserError, match=r"multi-head latent attention .*: use generation\.backend=hf"):
        require_supported(hf, str(path), GenerationConfig(backend="vllm"))
    require_supported(hf, str(path), GenerationConfig(backend="hf"))
