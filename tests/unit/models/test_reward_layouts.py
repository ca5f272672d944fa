"""Reward models in the layouts in which they are published: the rewards are those of a plain computation with transformers.

Each layout is written by transformers, or made of its files by renaming weights and editing config.json. docs/models.md lists the
layouts.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.export import export_model
from nemo_style_rlhf.models.heads import HEAD_FILES
from nemo_style_rlhf.models.lora import add_lora, merge_adapter, save_adapter
from nemo_style_rlhf.models.scalar import pad_token
from nemo_style_rlhf.models.scalar_loading import load_critic, load_reward_model
from nemo_style_rlhf.planning.blueprint import Blueprint
from nemo_style_rlhf.schema.common import LoRAConfig, ModelConfig
from tests.support.models import disturb, save_reward_model, save_token_classifier, save_tokenizer

PAD, IDS = 63, torch.tensor([[3, 4, 5, 6, 7, 8], [9, 10, 11, 63, 63, 63]])
MASK = (IDS != PAD).long()
DECODER = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 0,
}  # fmt: skip
HEADS = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 64, "pad_token_id": PAD}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**DECODER),
    "mistral": MistralConfig(**DECODER, sliding_window=4),
    "qwen2": Qwen2Config(**DECODER),
    "qwen3": Qwen3Config(**DECODER, head_dim=8),
    "gemma2": Gemma2Config(**DECODER, head_dim=8, query_pre_attn_scalar=8),
    "gemma3": Gemma3TextConfig(**DECODER, head_dim=8, query_pre_attn_scalar=8),
    "phi3": Phi3Config(**DECODER),
    "gpt2": GPT2Config(**HEADS),
    "gpt_neox": GPTNeoXConfig(**{key: value for key, value in DECODER.items() if key != "num_key_value_heads"}),
    "bloom": BloomConfig(**{"hidden_size": 16, "n_layer": 2, "n_head": 4, "vocab_size": 64, "pad_token_id": PAD}),
    "falcon": FalconConfig(
        **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "pad_token_id": PAD}
    ),
}
"""Configs of tiny decoders; the sequence classifier of each has a `score` head without a bias."""
OPT = OPTConfig(
    vocab_size=64, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64,
    word_embed_proj_dim=16, pad_token_id=PAD,
)  # fmt: skip
"""Its bare model is called `model.decoder`."""


def config(path: Path, **changes: object) -> ModelConfig:
    return ModelConfig(str(path), "float32", **changes)  # type: ignore[arg-type]


def write(path: Path, auto_class: type, hf_config: PreTrainedConfig, *, seed: int = 3) -> Path:
    torch.manual_seed(seed)
    auto_class.from_config(hf_config).save_pretrained(path)  # type: ignore[attr-defined]
    return path


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], **settings: object) -> Path:
    """Change the weights of a checkpoint, and replace settings of its config.json; None removes one."""
    file = path / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    hf_config = json.loads((path / "config.json").read_text()) | settings
    (path / "config.json").write_text(json.dumps({key: value for key, value in hf_config.items() if value is not None}))
    return path


def renamed(old: str, new: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda weights: {key.replace(old, new) if key.startswith(old) else key: w for key, w in weights.items()}


def hidden_states(path: Path) -> Tensor:
    """Last hidden states [B, T, H] of the bare model, by transformers alone."""
    with torch.no_grad():
        return AutoModel.from_pretrained(path).eval()(input_ids=IDS, attention_mask=MASK).last_hidden_state


def pooled(scores: Tensor) -> Tensor:
    """The entry of each row's last token: the rows of IDS have 6 and 3 tokens."""
    return scores[[0, 1], [5, 2]]


def rewards(path: Path, **settings: object) -> Tensor:
    with torch.no_grad():
        return load_reward_model(config(path), **settings).rewards(IDS, MASK)  # type: ignore[arg-type]


# --- decoders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_sequence_classifiers(tmp_path: Path, family: str) -> None:
    """Rewards are transformers' logits, and values, those of a critic that starts here, are the head's at every token."""
    hf_config = FAMILIES[family]
    hf_config.num_labels = 1
    path = write(tmp_path, AutoModelForSequenceClassification, hf_config)
    hf = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        expected = hf(input_ids=IDS, attention_mask=MASK).logits[:, 0]
        values = load_critic(config(path), seed=0)(IDS, MASK)
    torch.testing.assert_close(rewards(path), expected, atol=1e-5, rtol=0)
    head = load_file(path / "model.safetensors")["score.weight"]
    at_tokens = (hidden_states(path) @ head.T).squeeze(-1)
    torch.testing.assert_close(values[MASK.bool()], at_tokens[MASK.bool()], atol=1e-5, rtol=0)


NAMES = ["value_head", "v_head", "reward_head", "regression_head", "regression_layer", "rm_head"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_heads_of_other_names(tmp_path: Path, family: str, name: str) -> None:
    hf_config = FAMILIES[family]
    hf_config.num_labels = 1
    path = write(tmp_path, AutoModelForSequenceClassification, hf_config)
    expected = rewards(path)
    rewrite(path, renamed("score.", f"{name}."), architectures=["SomebodysRewardModel"])
    assert torch.equal(rewards(path), expected)


@pytest.mark.parametrize("file", HEAD_FILES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_head_in_a_file_beside_a_language_model(tmp_path: Path, family: str, file: str) -> None:
    """As LLaMA-Factory saves it: the reward is the head's output at the last token."""
    path = write(tmp_path, AutoModelForCausalLM, FAMILIES[family])
    save_tokenizer(path)
    generator = torch.Generator().manual_seed(3)
    hf = AutoModelForCausalLM.from_pretrained(path).eval()
    size = hf.config.hidden_size
    head = {
        "v_head.summary.weight": torch.randn(1, size, generator=generator),
        "v_head.summary.bias": torch.tensor([0.75]),
    }
    (save_file if file.endswith(".safetensors") else torch.save)(head, path / file)
    with torch.no_grad():
        hidden = [hf(row[None, :n], output_hidden_states=True).hidden_states[-1][0, -1] for row, n in zip(IDS, (6, 3))]
    expected = torch.stack([head["v_head.summary.weight"][0] @ each + 0.75 for each in hidden])
    torch.testing.assert_close(rewards(path), expected, atol=1e-5, rtol=0)
    critic = load_critic(config(path), seed=0)
    assert torch.equal(critic.hf.score.weight.float(), head["v_head.summary.weight"])


def test_an_export_has_transformers_name_of_the_head(tmp_path: Path) -> None:
    path = rewrite(save_reward_model(tmp_path / "published"), renamed("score.", "value_head."))
    export_model(load_critic(config(path), seed=0).hf, tmp_path / "export", source=str(path))
    hf = AutoModelForSequenceClassification.from_pretrained(tmp_path / "export", num_labels=1).eval()
    with torch.no_grad():
        plain = torch.stack([hf(input_ids=row[None, :n]).logits[0, 0] for row, n in zip(IDS, (6, 3), strict=True)])
    torch.testing.assert_close(plain, rewards(path), atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", ["score", "v_head.summary"])
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "falcon", "bloom", "gemma3", "opt"])
def test_a_bias_where_the_token_classifiers_head_has_another_name_or_is_missing(
    tmp_path: Path, family: str, layout: str
) -> None:
    hf_config = OPT if family == "opt" else FAMILIES[family]
    hf_config.num_labels = 1
    path = write(tmp_path / "plain", AutoModelForSequenceClassification, hf_config)
    save_tokenizer(path)
    expected = rewards(path) + 2.5
    rewrite(path, lambda weights: renamed("score.", f"{layout}.")(weights) | {f"{layout}.bias": torch.tensor([2.5])})
    torch.testing.assert_close(rewards(path), expected, atol=1e-5, rtol=0)
    given = config(path, lora=LoRAConfig(rank=2))
    critic = load_critic(given, seed=0)
    add_lora(critic.hf, given)
    disturb(critic)
    save_adapter(critic.hf, tmp_path / "adapter", given)
    merge_adapter(str(tmp_path / "adapter"), tmp_path / "merged")
    with torch.no_grad():
        trained = pooled(critic(IDS, MASK))
    torch.testing.assert_close(rewards(tmp_path / "merged"), trained, atol=1e-5, rtol=0)


@pytest.mark.parametrize("architectures", [["LlamaForSequenceClassification"], ["RewardModel"], None])
def test_openrlhfs_layout_says_two_labels_and_stores_one(tmp_path: Path, architectures: list[str] | None) -> None:
    """OpenRLHF #1039: without num_labels in config.json, transformers takes its default, 2, and a random head."""
    path = save_reward_model(tmp_path)
    expected = rewards(path)
    rewrite(path, dict, architectures=architectures, id2label=None, label2id=None, num_labels=None)
    assert AutoModelForSequenceClassification.from_pretrained(path, ignore_mismatched_sizes=True).num_labels == 2
    assert torch.equal(rewards(path), expected)
    assert Blueprint(config(path), scalar=True, cuda=False).hf.score.out_features == 1


@pytest.mark.parametrize("where", ["weights", "config.json"])
def test_openrlhfs_statistics(tmp_path: Path, where: str) -> None:
    path = save_reward_model(tmp_path)
    raw = rewards(path)
    if where == "weights":
        rewrite(path, lambda weights: weights | {"mean": torch.tensor([0.5]), "std": torch.tensor([4.0])})
    else:
        rewrite(path, dict, mean=0.5, std=4.0)
    assert torch.equal(rewards(path), raw)
    torch.testing.assert_close(rewards(path, normalize=True), (raw - 0.5) / 4, atol=1e-6, rtol=0)
    with torch.no_grad():
        values = load_critic(config(path), seed=0, normalize=True)(IDS, MASK)
    torch.testing.assert_close(pooled(values), (raw - 0.5) / 4, atol=1e-6, rtol=0)


def test_trls_value_head_beside_a_language_model(tmp_path: Path) -> None:
    """AutoModelForCausalLMWithValueHead: the policy's weights and v_head.summary, with a bias."""
    path = write(tmp_path, AutoModelForCausalLM, FAMILIES["qwen2"])
    head = {"v_head.summary.weight": torch.randn(1, 16), "v_head.summary.bias": torch.tensor([0.25])}
    rewrite(path, lambda weights: weights | head)
    expected = pooled(hidden_states(path) @ head["v_head.summary.weight"][0]) + 0.25
    torch.testing.assert_close(rewards(path), expected, atol=1e-5, rtol=0)


def test_a_sequence_classifiers_bias(tmp_path: Path) -> None:
    """transformers' own sequence classifier would drop it without a word."""
    path = save_reward_model(tmp_path)
    expected = rewards(path) + 3
    rewrite(path, lambda weights: weights | {"score.bias": torch.tensor([3.0])})
    torch.testing.assert_close(rewards(path), expected)


def test_a_leftover_index_of_other_files_is_not_read(tmp_path: Path) -> None:
    """transformers takes model.safetensors first."""
    path = save_reward_model(tmp_path)
    expected = rewards(path)
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"score.weight": "missing.bin"}}))
    assert torch.equal(rewards(path), expected)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"])
def test_a_pointer_of_git_lfs_is_no_file_of_weights(tmp_path: Path, name: str) -> None:
    path = save_reward_model(tmp_path)
    (path / "model.safetensors").unlink()
    (path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(UserError, match=rf"{name} holds no weights .*: download it again, with git-lfs"):
        rewards(path)


def test_a_head_of_several_layers_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, AutoModelForCausalLM, FAMILIES["qwen2"])
    rewrite(path, lambda weights: weights | {"score.0.weight": torch.ones(16, 16), "score.2.weight": torch.ones(1, 16)})
    with pytest.raises(UserError, match=r"score head of several layers \(score\.0\.weight, score\.2\.weight\)"):
        rewards(path)


def test_a_model_of_several_modalities_names_its_pad_token_in_its_language_models_config(tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    text = {**layers, "vocab_size": 64, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": PAD}
    vision = {**layers, "image_size": 28, "patch_size": 14}
    shape = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    Gemma3ForConditionalGeneration(shape).save_pretrained(tmp_path)
    critic = load_critic(config(tmp_path), seed=0)
    assert pad_token(critic.hf) == PAD
    with torch.no_grad():
        torch.testing.assert_close(critic.rewards(IDS, MASK), pooled(critic(IDS, MASK)))


def test_pytorch_files(tmp_path: Path) -> None:
    path = save_reward_model(tmp_path)
    expected = rewards(path)
    weights = load_file(path / "model.safetensors")
    torch.save(renamed("score.", "value_head.")(weights), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    assert torch.equal(rewards(path), expected)


def test_shards(tmp_path: Path) -> None:
    path = save_reward_model(tmp_path)
    expected = rewards(path)
    AutoModelForSequenceClassification.from_pretrained(path).save_pretrained(path, max_shard_size="50KB")
    (path / "model.safetensors").unlink(missing_ok=True)
    assert len(list(path.glob("model-*.safetensors"))) > 1
    assert torch.equal(rewards(path), expected)
    next(iter(sorted(path.glob("model-*.safetensors"))[::-1])).unlink()
    with pytest.raises(UserError, match=r"lacks the file|cannot be loaded"):
        rewards(path)


# --- several objectives -----------------------------------------------------------------------------------------------


def multi_objective(path: Path, *, bias: bool = False) -> Path:
    if not bias:
        return save_reward_model(path, num_labels=3)
    path = save_token_classifier(path, num_labels=3)
    return rewrite(path, lambda weights: weights | {"score.bias": torch.tensor([1.0, 2.0, 3.0])})


@pytest.mark.parametrize("bias", [False, True])
def test_label_weights_add_the_objectives_up(tmp_path: Path, bias: bool) -> None:
    path, mix = multi_objective(tmp_path, bias=bias), torch.tensor([0.5, -1.0, 2.0])
    weights = load_file(path / "model.safetensors")
    objectives = hidden_states(path) @ weights["score.weight"].T + weights.get("score.bias", torch.zeros(3))
    expected = pooled(objectives @ mix)
    torch.testing.assert_close(rewards(path, label_weights=mix.tolist()), expected, atol=1e-5, rtol=0)
    with torch.no_grad():
        critic = load_critic(config(path), seed=0, label_weights=mix.tolist())
        torch.testing.assert_close(pooled(critic(IDS, MASK)), expected, atol=1e-5, rtol=0)
        export_model(critic.hf, tmp_path / "export", source=str(path))
        torch.testing.assert_close(rewards(tmp_path / "export"), expected, atol=1e-5, rtol=0)


def test_armorms_layout(tmp_path: Path) -> None:
    """Its own class has a gating network, whose place label_weights take."""
    path, mix = multi_objective(tmp_path), [0.5, 0.25, 0.25]
    expected = rewards(path, label_weights=mix)
    gating = {"gating.layers.0.weight": torch.ones(8, 64), "reward_transform_matrix": torch.eye(3)}
    rewrite(
        path, lambda weights: renamed("score.", "regression_layer.")(weights) | gating,
        architectures=["LlamaForRewardModelWithGating"], auto_map={"AutoModelForSequenceClassification": "own.Model"},
    )  # fmt: skip
    assert torch.equal(rewards(path, label_weights=mix), expected)


@pytest.mark.parametrize("given", [None, [1.0], [1.0, 2.0, 3.0, 4.0]])
def test_each_label_needs_a_weight(tmp_path: Path, given: Sequence[float] | None) -> None:
    path = multi_objective(tmp_path)
    with pytest.raises(
        UserError, match=rf"{path} has 3 labels and label_weights are .*one number per label, reward_model\."
    ):
        rewards(path, label_weights=given)
