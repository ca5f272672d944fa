"""Checkpoints as they are published: every weight in them is read, or refused by its name."""

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2ForTokenClassification,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.export import export_model
from nemo_style_rlhf.models.loading import load_causal_lm
from nemo_style_rlhf.models.lora import add_lora, merge_adapter, save_adapter
from nemo_style_rlhf.models.scalar_loading import load_critic, load_reward_model, load_scalar_model
from nemo_style_rlhf.planning.blueprint import Blueprint
from nemo_style_rlhf.schema.common import LoRAConfig, ModelConfig
from tests.support.models import SHAPE, save_policy, save_reward_model, save_token_classifier, save_tokenizer

IDS = torch.arange(1, 13).reshape(2, 6)
MASK = torch.ones_like(IDS)


def config(path: Path, **changes: object) -> ModelConfig:
    return ModelConfig(str(path), "float32", **changes)  # type: ignore[arg-type]


def add_weights(path: Path, **weights: Tensor) -> Path:
    file = path / "model.safetensors"
    save_file({**load_file(file), **weights}, file, metadata={"format": "pt"})
    return path


def plain_scores(path: Path) -> Tensor:
    """What transformers' own class says at every token, [B, T]."""
    with torch.no_grad():
        return AutoModelForTokenClassification.from_pretrained(path).eval()(IDS, MASK).logits.squeeze(-1)


# --- a score head with a bias -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [False, True])
def test_a_token_classifiers_bias_is_part_of_its_scores(tmp_path: Path, packing: bool) -> None:
    path = save_token_classifier(tmp_path, bias=3.0)
    model = load_reward_model(config(path, packing=packing))
    with torch.no_grad():
        scores = model(IDS, MASK)
    torch.testing.assert_close(scores, plain_scores(path))
    assert scores.mean() > 2


def test_a_head_without_a_bias_keeps_its_bits(tmp_path: Path) -> None:
    """A token classifier without a bias is the sequence classifier with the same weights."""
    path = save_token_classifier(tmp_path / "tokens", bias=0.0)
    weights = load_file(path / "model.safetensors")
    weights.pop("score.bias")
    plain = save_reward_model(tmp_path / "plain")
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        assert torch.equal(load_reward_model(config(path))(IDS, MASK), load_reward_model(config(plain))(IDS, MASK))


@pytest.mark.parametrize("rank", [0, 4])
def test_a_bias_learns_and_is_exported(tmp_path: Path, rank: int) -> None:
    given = config(save_token_classifier(tmp_path / "given", bias=3.0), lora=LoRAConfig(rank=rank))
    model = load_reward_model(given)
    add_lora(model.hf, given)
    (name,) = (name for name, parameter in model.named_parameters() if "score" in name and name.endswith("bias")
               and parameter.requires_grad)  # fmt: skip
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    model(IDS, MASK).mean().backward()
    optimizer.step()
    # The bias is in every score once, so the gradient of their mean is 1: 3.0 - 0.1 * 1.
    assert dict(model.named_parameters())[name].item() == pytest.approx(2.9)
    with torch.no_grad():
        trained = model(IDS, MASK)
    export_model(model.hf, tmp_path / "export", source=given.path)
    torch.testing.assert_close(plain_scores(tmp_path / "export"), trained)
    with torch.no_grad():
        torch.testing.assert_close(load_reward_model(config(tmp_path / "export"))(IDS, MASK), trained)
    if rank:
        save_adapter(model.hf, tmp_path / "adapter", given)
        merge_adapter(str(tmp_path / "adapter"), tmp_path / "merged")
        torch.testing.assert_close(plain_scores(tmp_path / "merged"), trained)


def test_the_plan_counts_the_bias(tmp_path: Path) -> None:
    with_bias = Blueprint(config(save_token_classifier(tmp_path / "tokens")), scalar=True, cuda=False)
    without = Blueprint(config(save_reward_model(tmp_path / "plain")), scalar=True, cuda=False)
    assert with_bias.elements == without.elements + 1


def test_a_head_of_another_name_is_refused_by_the_run_and_by_its_plan(tmp_path: Path) -> None:
    """GPT-2's token classifier calls its head `classifier`."""
    model = GPT2ForTokenClassification(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=64, num_labels=1))
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="GPT2ForTokenClassification has no `score` head"):
        load_reward_model(config(tmp_path))
    with pytest.raises(UserError, match="GPT2ForTokenClassification has no `score` head"):
        Blueprint(config(tmp_path), scalar=True, cuda=False)


# --- weights that nobody expected -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ({"value_head.weight": torch.ones(1, 64)}, "has the heads score and value_head, a reward model has one"),
        ({"gating.weight": torch.ones(1)}, "holds the weights gating.weight that LlamaForSequenceClassification does not have"),
        ({f"extra.{row}": torch.ones(1) for row in range(5)}, "holds the weights extra.0, extra.1, extra.2 and 2 more that"),
    ],
)  # fmt: skip
def test_a_reward_models_unknown_weights_are_refused(tmp_path: Path, weights: dict[str, Tensor], sentence: str) -> None:
    path = add_weights(save_reward_model(tmp_path), **weights)
    with pytest.raises(UserError, match=sentence) as refusal:
        load_reward_model(config(path))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("names", [("reward_mean", "reward_std"), ("mean", "std")], ids=["ours", "OpenRLHF's"])
def test_rewards_are_normalized_by_the_statistics_in_the_config(tmp_path: Path, names: tuple[str, str]) -> None:
    """OpenRLHF keeps them in config.json, too, under names of its own."""
    path = save_reward_model(tmp_path, **dict(zip(names, (0.5, 4.0), strict=True)))
    with torch.no_grad():
        raw = load_reward_model(config(path))(IDS, MASK)
        torch.testing.assert_close(load_reward_model(config(path), normalize=True)(IDS, MASK), (raw - 0.5) / 4)


@pytest.mark.parametrize("statistics", [{}, {"mean": 0.5}, {"mean": [0.5], "std": [4.0]}, {"mean": 0.0, "std": 0.0}])
def test_normalizing_without_statistics_is_refused(tmp_path: Path, statistics: dict[str, object]) -> None:
    path = save_reward_model(tmp_path, **statistics)
    with pytest.raises(
        UserError, match=r"has no reward_mean and reward_std in its config\.json to normalize rewards with"
    ):
        load_reward_model(config(path), normalize=True)


def test_a_policys_unknown_weights_are_refused(tmp_path: Path) -> None:
    """A value head beside the policy, as TRL writes it."""
    path = add_weights(save_policy(tmp_path), **{"v_head.summary.weight": torch.ones(1, 64)})
    with pytest.raises(
        UserError, match=r"holds the weights v_head\.summary\.weight that LlamaForCausalLM does not have"
    ):
        load_causal_lm(config(path))


QUANTIZATIONS = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "no quant_method": {"load_in_8bit": True},
}


@pytest.mark.parametrize("method", QUANTIZATIONS)
def test_quantized_checkpoints_are_refused_in_every_role_and_by_the_plan(tmp_path: Path, method: str) -> None:
    policy, reward = config(save_policy(tmp_path / "policy")), config(save_reward_model(tmp_path / "reward"))
    for path in (policy.path, reward.path):
        file = Path(path) / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": QUANTIZATIONS[method]}))
    for load in (
        lambda: load_causal_lm(policy),
        lambda: load_critic(policy, seed=0),
        lambda: load_scalar_model(policy),
        lambda: load_critic(reward, seed=0),
        lambda: load_reward_model(reward),
        lambda: Blueprint(policy, scalar=False, cuda=True),
        lambda: Blueprint(reward, scalar=True, cuda=False),
    ):
        with pytest.raises(
            UserError, match=rf"is quantized \(.*: {method}\).*give the checkpoint that it was made from"
        ):
            load()


def test_an_empty_quantization_config_is_none(tmp_path: Path) -> None:
    path = save_policy(tmp_path)
    settings = json.loads((path / "config.json").read_text()) | {"quantization_config": None}
    (path / "config.json").write_text(json.dumps(settings))
    assert load_causal_lm(config(path)).dtype == torch.float32


def test_a_reward_model_is_no_policy_even_where_embeddings_are_tied(tmp_path: Path) -> None:
    path = save_reward_model(tmp_path, tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"holds the weights score\.weight that LlamaForCausalLM does not have"):
        load_causal_lm(config(path))


TINY = {"vocab_size": 64, "n_positions": 32, "n_embd": 8, "n_layer": 1, "n_head": 2}
NEOX = {"vocab_size": 64, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
OLD_CHECKPOINTS = {
    "llama": (LlamaConfig(**SHAPE), {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}),
    "tied llama": (LlamaConfig(**SHAPE, tie_word_embeddings=True), {}),
    "gpt2": (GPT2Config(**TINY), {"transformer.h.0.attn.bias": torch.ones(1, 1, 32, 32)}),
    "gptj": (
        GPTJConfig(**TINY, rotary_dim=2),
        {
            "transformer.h.0.attn.bias": torch.ones(1, 1, 32, 32),
            "transformer.h.0.attn.masked_bias": torch.tensor(-1e9),
        },
    ),
    "gpt_neox": (
        GPTNeoXConfig(**NEOX),
        {
            "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 32, 32),
            "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
            "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(1),
            "gpt_neox.layers.0.attention.rotary_emb.cos_cached": torch.ones(1, 1, 32, 4),
        },
    ),
}


@pytest.mark.parametrize("name", OLD_CHECKPOINTS)
def test_buffers_that_older_releases_saved_are_no_mistake(tmp_path: Path, name: str) -> None:
    hf_config, buffers = OLD_CHECKPOINTS[name]
    AutoModelForCausalLM.from_config(hf_config).save_pretrained(tmp_path)
    add_weights(tmp_path, **buffers)
    if name == "tied llama":  # as engines that gather each tensor by itself write it
        weights = load_file(tmp_path / "model.safetensors")
        add_weights(tmp_path, **{"lm_head.weight": weights["model.embed_tokens.weight"].clone()})
    assert isinstance(load_causal_lm(config(tmp_path)), PreTrainedModel)
    assert load_scalar_model(config(tmp_path)).hf.score.weight.shape[0] == 1


def test_checkpoints_without_the_prefix_of_their_class_load(tmp_path: Path) -> None:
    """As on the hub: weights of the bare GPT-2, without `transformer.`, and with the masks of its time."""
    model = GPT2LMHeadModel(GPT2Config(**TINY))
    model.transformer.save_pretrained(tmp_path)
    add_weights(tmp_path, **{"h.0.attn.bias": torch.ones(1, 1, 32, 32)})
    loaded = load_causal_lm(config(tmp_path))
    torch.testing.assert_close(loaded(IDS).logits, model.eval()(IDS).logits)


def test_the_language_models_head_beside_a_reward_head_is_no_mistake(tmp_path: Path) -> None:
    """Nothing of the score is read from it."""
    head = load_reward_model(config(save_reward_model(tmp_path))).hf.score.weight
    path = add_weights(tmp_path, **{"lm_head.weight": torch.ones(64, 64)})
    assert torch.equal(load_reward_model(config(path)).hf.score.weight, head)


# --- a causal LM in place of a reward model ---------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [1, 2])
def test_a_causal_lm_is_no_reward_model(tmp_path: Path, labels: int) -> None:
    path = save_policy(tmp_path, num_labels=labels)
    sentence = (
        f"{path} is a causal LM (LlamaForCausalLM), no reward model: train one from it with "
        "trainers/train_reward_model.py, or give another path; a critic server without a reward model "
        "(reward_model.combine_rm_and_critic_server=false) starts its critic from it"
    )
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}$"):
        load_reward_model(config(path))


def test_gpt2_is_a_causal_lm_too(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(**TINY)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(UserError, match=r"is a causal LM \(GPT2LMHeadModel\), no reward model"):
        load_reward_model(config(tmp_path))
    model = load_scalar_model(config(tmp_path))
    assert isinstance(model.hf, GPT2ForSequenceClassification)


def test_a_model_of_images_and_text_is_a_causal_lm_whose_text_gets_a_head(tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    text = {**layers, "vocab_size": 64, "num_key_value_heads": 1, "head_dim": 8}
    vision = {**layers, "image_size": 28, "patch_size": 14}
    shape = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    Gemma3ForConditionalGeneration(shape).save_pretrained(tmp_path / "policy")
    save_tokenizer(tmp_path / "policy")
    given = config(tmp_path / "policy")
    with pytest.raises(UserError, match=r"is a causal LM \(Gemma3ForConditionalGeneration\), no reward model"):
        load_reward_model(given)
    model = load_scalar_model(given)
    export_model(model.hf, tmp_path / "export", source=given.path)
    with torch.no_grad():
        assert torch.equal(load_reward_model(config(tmp_path / "export"))(IDS, MASK), model(IDS, MASK))


def test_an_encoder_decoder_is_named(tmp_path: Path) -> None:
    shape = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(shape).save_pretrained(tmp_path)
    for load in (load_reward_model, load_scalar_model):
        with pytest.raises(UserError, match=r"is an encoder-decoder \(t5\), a reward model must be a decoder: give"):
            load(config(tmp_path))


# --- names of models that may lie on the hub --------------------------------------------------------------------------

LOADS = """
import sys
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.loading import load_tokenizer
try:
    load_tokenizer(sys.argv[1])
except UserError as error:
    print(error)
"""


@pytest.mark.more
@pytest.mark.parametrize("offline", ["", "1"])
def test_a_name_that_is_no_folder_is_asked_for_once_where_the_hub_cannot_be_reached(
    tmp_path: Path, offline: str
) -> None:
    """The hub hangs up on every call, or the environment forbids to ask it."""
    calls = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            calls.append(self.path)
            self.close_connection = True

        do_GET = do_HEAD

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{hub.server_address[1]}"
        environment = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": offline}
        done = subprocess.run(
            [sys.executable, "-c", LOADS, "models/mymodel"],
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )
        hub.shutdown()
    sentence = (
        r"^there is no folder models/mymodel, and the hub cannot be asked for a model of that name \(.*\): correct "
    )
    assert re.search(sentence, done.stdout), done.stdout + done.stderr
    calls = [call for call in calls if "mymodel" in call]  # the library has calls of its own
    assert calls == ([] if offline else ["/models/mymodel/resolve/main/config.json"])


@pytest.mark.parametrize("family", [MixtralConfig, Qwen3MoeConfig])
def test_experts_are_refused_on_a_gpu_whose_bits_must_repeat(family, tmp_path: Path, monkeypatch) -> None:
    family(**SHAPE).save_pretrained(tmp_path)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match=r"run\.deterministic=true does not support .* it has \d+ experts"):
        load_causal_lm(ModelConfig(path=str(tmp_path)))
