"""Adapters: what they leave alone, what they change, and that merging and peft's own loading agree with it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DeepseekV2Config,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.export import export_model
from nemo_style_rlhf.models.loading import load_causal_lm
from nemo_style_rlhf.models.lora import adapters_off, add_lora, has_lora, merge_adapter, merged, save_adapter
from nemo_style_rlhf.models.scalar_loading import load_reward_model
from nemo_style_rlhf.schema.common import LoRAConfig, ModelConfig
from tests.support.models import disturb, save_policy, save_reward_model, save_tokenizer
from tests.support.paths import ROOT

IDS = torch.arange(2, 14).view(2, 6)


def config(path: Path, **lora: object) -> ModelConfig:
    return ModelConfig(str(path), dtype="float32", lora=LoRAConfig(**{"rank": 4, **lora}))


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.fixture(params=["llama, tied", "llama, untied", "gpt2"])
def policy(request, tmp_path) -> Path:
    if request.param == "gpt2":
        GPT2LMHeadModel(
            GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
        ).save_pretrained(tmp_path / "policy")
        save_tokenizer(tmp_path / "policy")
        return tmp_path / "policy"
    return save_policy(tmp_path / "policy", tie_word_embeddings=request.param == "llama, tied")


def test_a_policy_is_its_own_reference_and_its_weights_merge(policy: Path, tmp_path: Path) -> None:
    model = load_causal_lm(config(policy))
    before = logits(model)
    add_lora(model, config(policy))
    assert has_lora(model)
    assert torch.equal(logits(model), before)
    disturb(model)
    after = logits(model)
    assert (after - before).abs().max() > 0.1
    with adapters_off(model):
        assert torch.equal(logits(model), before)
    assert torch.equal(logits(model), after)
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert 0 < trainable < 0.3 * sum(parameter.numel() for parameter in model.parameters())

    plain = AutoModelForCausalLM.from_pretrained(policy)
    weights = dict(merged(model.state_dict().items(), model))
    assert weights.keys() == plain.state_dict().keys()
    export_model(model, tmp_path / "export", source=str(policy))
    save_adapter(model, tmp_path / "adapter", config(policy))
    merge_adapter(str(tmp_path / "adapter"), tmp_path / "merged")
    peft = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(peft), after)
    for folder in ("export", "merged"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        torch.testing.assert_close(logits(loaded), after, atol=1e-4, rtol=1e-4)


def test_the_head_of_a_reward_model_is_trained_whole(tmp_path: Path) -> None:
    path = save_reward_model(tmp_path / "reward", pad_token_id=0)
    model = load_reward_model(config(path))
    mask = torch.ones_like(IDS)
    before = model(IDS, mask).detach()
    add_lora(model.hf, config(path))
    assert torch.equal(model(IDS, mask), before)
    disturb(model.hf)
    after = model(IDS, mask).detach()
    export_model(model.hf, tmp_path / "export", source=str(path))
    torch.testing.assert_close(load_reward_model(ModelConfig(str(tmp_path / "export"), "float32"))(IDS, mask), after)
    save_adapter(model.hf, tmp_path / "adapter", config(path))
    plain = AutoModelForSequenceClassification.from_pretrained(path)
    peft = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(peft)[:, 0], after[:, -1])


def test_layers_can_be_named_and_wrong_names_are_refused(tmp_path: Path) -> None:
    path = save_policy(tmp_path / "policy")
    model = load_causal_lm(config(path))
    add_lora(model, config(path, target_modules=["q_proj"]))
    assert {name.split(".")[-4] for name, _ in model.named_parameters() if "lora_A" in name} == {"q_proj"}
    with pytest.raises(UserError, match="names no linear layer of LlamaForCausalLM: give names such as q_proj"):
        add_lora(load_causal_lm(config(path)), config(path, target_modules=["attention"]))


def test_a_wrong_name_beside_a_right_one_is_refused(tmp_path: Path) -> None:
    """peft would ignore it without a word."""
    path = save_policy(tmp_path / "policy")
    with pytest.raises(UserError, match="q_porj names no linear layer of LlamaForCausalLM: give names"):
        add_lora(load_causal_lm(config(path)), config(path, target_modules=["q_proj", "q_porj"]))


def test_layers_that_peft_refuses_are_one_sentence(tmp_path: Path) -> None:
    mamba = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4)
    AutoModelForCausalLM.from_config(mamba).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"peft cannot put adapters into MambaForCausalLM \(.*out_proj.*\): name other"):
        add_lora(load_causal_lm(config(tmp_path)), config(tmp_path))


SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_experts_per_tok": 2,
}  # fmt: skip
EXPERTS = {
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, num_key_value_heads=1, moe_intermediate_size=16, num_experts=4),
    "mixtral": MixtralConfig(**SHAPE, num_key_value_heads=1, num_local_experts=4),
    "deepseek_v2": DeepseekV2Config(
        **SHAPE, num_key_value_heads=2, moe_intermediate_size=16, n_routed_experts=4, n_shared_experts=1, kv_lora_rank=16,
        q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, first_k_dense_replace=1, n_group=1,
        topk_group=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", EXPERTS)
def test_with_experts_adapters_go_to_the_attention_layers(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even to dense layers beside the experts: peft takes their names for those of experts when it loads the adapter."""
    caplog.set_level("INFO")
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(EXPERTS[family]).save_pretrained(tmp_path / "policy")
    save_tokenizer(tmp_path / "policy")
    model = load_causal_lm(config(tmp_path / "policy"))
    add_lora(model, config(tmp_path / "policy"))
    assert {name.split(".")[-5] for name, _ in model.named_parameters() if "lora_A" in name} == {"self_attn"}
    assert "has experts: they and all else in their blocks (mlp) stay frozen, adapters go to " in caplog.text
    disturb(model)
    after = logits(model)
    save_adapter(model, tmp_path / "adapter", config(tmp_path / "policy"))
    merge_adapter(str(tmp_path / "adapter"), tmp_path / "merged")
    export_model(model, tmp_path / "export", source=str(tmp_path / "policy"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    torch.testing.assert_close(logits(PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()), after)
    for folder in ("merged", "export"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        torch.testing.assert_close(logits(loaded), after, atol=1e-4, rtol=1e-4)
    for name in ("gate_proj", "experts", "w1", "shared_experts.up_proj", "mlp.gate"):
        with pytest.raises(
            UserError, match=f"{name} names no linear layer of .* outside of the blocks with experts, which stay"
        ):
            add_lora(
                load_causal_lm(config(tmp_path / "policy")),
                config(tmp_path / "policy", target_modules=["q_proj", name]),
            )


@pytest.mark.slow("starts a program")
def test_merging_what_is_no_adapter_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "trainers/merge_lora.py", str(tmp_path), str(tmp_path / "out")]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 2
    assert process.stderr.strip().startswith("error: there is no adapter at") and "\n" not in process.stderr.strip()
