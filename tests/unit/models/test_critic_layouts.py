"""Critics that start from a language model, from an earlier critic, or from a reward model in a layout of its own."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForTokenClassification

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.export import export_model
from nemo_style_rlhf.models.lora import add_lora, merge_adapter, save_adapter
from nemo_style_rlhf.models.scalar import ScalarModel
from nemo_style_rlhf.models.scalar_loading import load_critic, load_reward_model
from nemo_style_rlhf.schema.common import LoRAConfig
from tests.support.models import disturb, save_policy, save_reward_model, save_token_classifier, save_tokenizer
from tests.unit.models.test_reward_layouts import (
    FAMILIES,
    IDS,
    MASK,
    config,
    hidden_states,
    multi_objective,
    pooled,
    renamed,
    rewards,
    rewrite,
    write,
)  # fmt: skip


@pytest.mark.parametrize("bare", [False, True], ids=["causal LM", "base model"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2"])
def test_a_critic_from_a_language_model_has_a_new_seeded_head(tmp_path: Path, family: str, bare: bool) -> None:
    path = write(tmp_path, AutoModel if bare else AutoModelForCausalLM, FAMILIES[family])
    with torch.no_grad():
        critic = load_critic(config(path), seed=1)
        torch.manual_seed(99)  # not the global generator decides
        again, other = load_critic(config(path), seed=1), load_critic(config(path), seed=2)
        values = critic(IDS, MASK)
        assert torch.equal(values, again(IDS, MASK))
        assert not torch.equal(values, other(IDS, MASK))
        head = critic.hf.score.weight
        expected = (hidden_states(path) @ head.T).squeeze(-1)
    torch.testing.assert_close(values[MASK.bool()], expected[MASK.bool()], atol=1e-5, rtol=0)
    assert 0 < float(head.std()) < 3 / 17  # 1 / (hidden size + 1) = 1 / 17


def test_a_critic_from_an_earlier_runs_critic(tmp_path: Path) -> None:
    first = load_critic(config(save_policy(tmp_path / "policy")), seed=1)
    disturb(first)
    export_model(first.hf, tmp_path / "critic", source=str(tmp_path / "policy"))
    second = load_critic(config(tmp_path / "critic"), seed=2)
    with torch.no_grad():
        assert torch.equal(second(IDS, MASK), first(IDS, MASK))


def test_a_critic_whose_head_has_a_name_of_its_own_learns_with_adapters(tmp_path: Path) -> None:
    """The adapter is merged into a base whose head has another name and shape."""
    path = rewrite(multi_objective(tmp_path / "rm"), renamed("score.", "regression_layer."))
    given = config(path, lora=LoRAConfig(rank=2))
    critic = load_critic(given, seed=0, label_weights=[1.0, 1.0, 1.0])
    add_lora(critic.hf, given)
    disturb(critic)
    save_adapter(critic.hf, tmp_path / "adapter", given)
    merge_adapter(str(tmp_path / "adapter"), tmp_path / "merged")
    with torch.no_grad():
        torch.testing.assert_close(rewards(tmp_path / "merged"), pooled(critic(IDS, MASK)), atol=1e-5, rtol=0)


def test_label_weights_are_of_the_reward_model_where_the_critic_has_one_label(tmp_path: Path) -> None:
    path = save_reward_model(tmp_path)
    with torch.no_grad():
        plain, beside = (load_critic(config(path), seed=0, label_weights=w)(IDS, MASK) for w in (None, [0.5, 0.25]))
    assert torch.equal(plain, beside)


def test_packing_gives_the_same_values(tmp_path: Path) -> None:
    path = write(tmp_path, AutoModelForCausalLM, FAMILIES["llama"])
    with torch.no_grad():
        plain, packed = (load_critic(config(path, packing=packing), seed=1)(IDS, MASK) for packing in (False, True))
    torch.testing.assert_close(plain * MASK, packed, atol=1e-5, rtol=0)


def test_a_reward_model_without_a_head_in_its_files_is_refused(tmp_path: Path) -> None:
    path = save_reward_model(tmp_path)
    rewrite(path, lambda weights: {key: weight for key, weight in weights.items() if not key.startswith("score")})
    for load in (load_reward_model, lambda given: load_critic(given, seed=0)):
        with pytest.raises(
            UserError, match=r"lacks the weights score\.weight that LlamaForSequenceClassification needs"
        ):
            load(config(path))


def test_a_base_model_is_no_reward_model(tmp_path: Path) -> None:
    path = write(tmp_path, AutoModel, FAMILIES["qwen2"])
    save_tokenizer(path)
    with pytest.raises(
        UserError, match=r"is a model without a head \(Qwen2Model\), no reward model: train one from it"
    ):
        load_reward_model(config(path))
    assert isinstance(load_critic(config(path), seed=0), ScalarModel)


def test_a_token_classifier_of_transformers(tmp_path: Path) -> None:
    path = save_token_classifier(tmp_path, bias=3.0)
    with torch.no_grad():
        expected = AutoModelForTokenClassification.from_pretrained(path).eval()(IDS, MASK).logits.squeeze(-1)
    torch.testing.assert_close(rewards(path), pooled(expected), atol=1e-5, rtol=0)
