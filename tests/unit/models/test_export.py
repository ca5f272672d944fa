"""What a trained model is written with, and what is found before the training if it cannot be."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.export import export_model, rehearse_export
from nemo_style_rlhf.models.loading import load_causal_lm
from nemo_style_rlhf.models.lora import add_lora, merge_adapter, save_adapter
from nemo_style_rlhf.schema.common import LoRAConfig, ModelConfig
from tests.support.models import save_policy

PUBLISHED = [
    {"temperature": 0.9, "top_p": 0.6},  # Llama-2's and Vicuna's: no do_sample
    {"do_sample": False, "top_k": 40, "eos_token_id": [0, 1]},
    {"num_beams": 1, "early_stopping": True, "length_penalty": 2.0},
    {"temperature": 0.0, "do_sample": True},
]
"""Generation configs as people publish them, which transformers refuses to save."""


@pytest.fixture(params=PUBLISHED, ids=lambda content: ",".join(content))
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    save_policy(tmp_path / "source")
    (tmp_path / "source" / "generation_config.json").write_text(json.dumps(request.param, indent=3))
    return tmp_path / "source"


def assert_passed_on(source: Path, target: Path) -> None:
    name = "generation_config.json"
    assert (target / name).read_bytes() == (source / name).read_bytes()
    AutoTokenizer.from_pretrained(target)


def test_the_generation_config_is_passed_on_as_it_is(source: Path, tmp_path: Path) -> None:
    model = load_causal_lm(ModelConfig(str(source), "float32"))
    before = model.generation_config
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    rehearse_export(model, source=str(source))
    export_model(model, tmp_path / "target", source=str(source))
    assert_passed_on(source, tmp_path / "target")
    assert model.generation_config is before
    ids = torch.arange(12).view(2, 6)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype="float32")
    torch.testing.assert_close(exported(ids).logits, model(ids).logits, atol=1e-4, rtol=0)


def test_a_merged_adapter_has_it_too(source: Path, tmp_path: Path) -> None:
    config = ModelConfig(str(source), "float32", lora=LoRAConfig(rank=2))
    model = load_causal_lm(config)
    add_lora(model, config)
    save_adapter(model, tmp_path / "adapter", config)
    merge_adapter(str(tmp_path / "adapter"), tmp_path / "merged")
    assert_passed_on(source, tmp_path / "merged")


def test_what_could_not_be_exported_is_refused_before_the_training(tmp_path: Path) -> None:
    source = save_policy(tmp_path / "source")
    model = load_causal_lm(ModelConfig(str(source), "float32"))
    model.config.vocab_size += 8
    with pytest.raises(
        UserError, match=r"its model\.embed_tokens\.weight has shape \(64, \d+\) where its config\.json asks for \(72"
    ):
        rehearse_export(model, source=str(source))
    model.config.vocab_size -= 8

    def refuse(folder: Path) -> None:
        raise ValueError("no template")

    with pytest.raises(UserError, match=r"could not be exported \(ValueError: no template\)"):
        rehearse_export(model, source=str(source), write_notes=refuse)


def test_an_adapter_takes_the_place_of_the_one_before_only_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(str(save_policy(tmp_path / "source")), "float32", lora=LoRAConfig(rank=2))
    model = load_causal_lm(config)
    add_lora(model, config)
    save_adapter(model, tmp_path / "adapter", config)
    before = {path.name: path.read_bytes() for path in (tmp_path / "adapter").iterdir()}

    def full(weights: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nemo_style_rlhf.models.lora.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_adapter(model, tmp_path / "adapter", config)
    assert {path.name: path.read_bytes() for path in (tmp_path / "adapter").iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"source", "adapter"}
