"""config.json says as much as transformers' config of it, where it says something."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, BertConfig, GemmaConfig, LlamaConfig, PretrainedConfig

from nemo_style_rlhf.models.kinds import ConfigFile

CONFIGS = {
    "llama": LlamaConfig(max_position_embeddings=77, architectures=["LlamaForCausalLM"]),
    "one label": LlamaConfig(num_labels=1),
    "three labels": BertConfig(num_labels=3, architectures=["BertForSequenceClassification"]),
    "gemma": GemmaConfig(max_position_embeddings=99),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_it_says_what_transformers_says(name: str, tmp_path: Path) -> None:
    config: PretrainedConfig = CONFIGS[name]
    config.save_pretrained(tmp_path)
    found, loaded = ConfigFile.read(str(tmp_path)), AutoConfig.from_pretrained(tmp_path)
    assert found is not None
    for key in ("architectures", "model_type", "num_labels"):
        assert getattr(found, key) == getattr(loaded, key), key
    assert bool(found.is_encoder_decoder) == loaded.is_encoder_decoder
    assert found.get_text_config().max_position_embeddings == loaded.get_text_config().max_position_embeddings


def test_the_language_model_inside_another_has_positions_of_its_own(tmp_path: Path) -> None:
    values = {"model_type": "gemma3", "text_config": {"max_position_embeddings": 55}, "max_position_embeddings": 3}
    (tmp_path / "config.json").write_text(json.dumps(values))
    found = ConfigFile.read(str(tmp_path))
    assert found is not None and found.get_text_config().max_position_embeddings == 55


def test_what_is_no_config_says_nothing(tmp_path: Path) -> None:
    assert ConfigFile.read("owner/name") is None
    for text in ("[]", "{", ""):
        (tmp_path / "config.json").write_text(text)
        assert ConfigFile.read(str(tmp_path)) is None
