"""Tiny Llamas as shapes: their parameters, and memory that grows as it must."""

from pathlib import Path

import pytest
from torch import Tensor
from transformers import GPT2Config, OPTConfig

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.planning.blueprint import Blueprint, PlannedBatch
from nemo_style_rlhf.schema.common import LoRAConfig, ModelConfig
from tests.support.models import save_policy, save_reward_model

# tests/support/models.py: 64 wide, 96 in the MLP, 2 layers, 64 tokens. A layer: 4 x 64^2 + 3 x 64 x 96 + 2 x 64 = 34,944.
LAYERS = 2 * 34_944
EMBEDDING = 64 * 64
NORM = 64


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_policy(tmp_path_factory.mktemp("policy")))


def blueprint(path: str, *, scalar: bool = False, cuda: bool = False, **settings: object) -> Blueprint:
    return Blueprint(ModelConfig(path=path, **settings), scalar=scalar, cuda=cuda)


def test_parameters_and_their_bytes(policy: str):
    found = blueprint(policy)
    assert found.elements == found.trained == LAYERS + 2 * EMBEDDING + NORM
    assert found.weights == 2 * found.elements
    assert found.largest == 64 * 96
    assert found.head == 2 * EMBEDDING
    assert found.kv_bytes_per_token == 2 * 2 * 64 * 2  # keys and values of 2 layers, 2 heads of 32, 2 bytes
    # Per token 2 for each parameter, and in 2 layers 64 products with keys and 64 with values of 5 positions on average.
    assert found.forward_flops(10) == 10 * 2 * (found.elements + 2 * 2 * 64 * 5)


def test_a_critic_has_a_score_in_place_of_the_head(tmp_path: Path):
    assert blueprint(str(save_reward_model(tmp_path)), scalar=True).elements == LAYERS + EMBEDDING + NORM + 64


def test_adapters_are_all_that_trains(policy: str):
    found = blueprint(policy, lora=LoRAConfig(rank=4))
    # rank x (inputs + outputs) of each linear layer: 4 of 64 to 64, 3 between 64 and 96, in 2 layers.
    assert found.trained == 2 * 4 * (4 * 128 + 3 * 160)
    assert found.base_weights == 2 * (found.elements - found.trained)


def test_activations_follow_rows_and_precision(policy: str):
    small, large = PlannedBatch(8, 32, 100), PlannedBatch(16, 32, 200)
    found = blueprint(policy)
    once, twice = (found.training(batch)["activations"] for batch in (small, large))
    assert 1.8 < twice / once < 2
    assert found.inference(small)["activations"] < once / 3
    in_fp32 = blueprint(policy, dtype="float32").training(small)["activations"]
    assert in_fp32 > 1.4 * once
    recomputing = blueprint(policy, dtype="float32", gradient_checkpointing=True)
    assert recomputing.training(small)["activations"] < 0.8 * in_fp32


def test_attention_of_a_gpu_does_not_hold_time_squared(policy: str):
    long = PlannedBatch(8, 128, 100)
    assert (
        blueprint(policy, cuda=True).training(long)["activations"]
        < 0.6 * blueprint(policy).training(long)["activations"]
    )


def test_packed_sequences_can_be_planned(policy: str):
    assert blueprint(policy, packing=True).training(PlannedBatch(3, 32, 50)).total() > 0


@pytest.mark.parametrize("scalar", [False, True])
def test_packed_attention_of_a_gpu_does_not_hold_time_squared(scalar: bool, tmp_path: Path):
    path = str((save_reward_model if scalar else save_policy)(tmp_path))
    packed, padded = (
        blueprint(path, scalar=scalar, cuda=True, packing=packing).training(PlannedBatch(2, 512, 100))["activations"]
        for packing in (True, False)
    )
    assert 0.9 * padded < packed < 1.05 * padded


def test_what_is_no_model_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="nothing: there is no such folder"):
        blueprint(str(tmp_path / "nothing"))
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(UserError, match="not a model whose shapes transformers knows"):
        blueprint(str(tmp_path))


def test_dropout_is_planned_only_where_the_run_has_it(tmp_path: Path):
    GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=2, n_positions=128).save_pretrained(tmp_path / "0.1")
    GPT2Config.from_pretrained(tmp_path / "0.1", resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0).save_pretrained(
        tmp_path / "none"
    )
    batch = PlannedBatch(8, 128, 100)
    none, off, on = (
        blueprint(str(tmp_path / name), cuda=True, disable_dropout=disabled).training(batch)["activations"]
        for name, disabled in (("none", False), ("0.1", True), ("0.1", False))
    )
    assert none == off < on


def test_a_model_that_may_drop_layers_is_planned_with_all(tmp_path: Path):
    shape = {"hidden_size": 64, "ffn_dim": 96, "num_attention_heads": 2, "word_embed_proj_dim": 64, "vocab_size": 64}
    activations = {}
    for layers, recomputing in ((2, False), (4, False), (4, True)):
        OPTConfig(**shape, num_hidden_layers=layers).save_pretrained(tmp_path)
        found = blueprint(str(tmp_path), gradient_checkpointing=recomputing).training(PlannedBatch(8, 32, 100))
        activations[layers, recomputing] = found["activations"]
    assert 1.5 < activations[4, False] / activations[2, False] < 2
    assert activations[4, True] < 0.6 * activations[4, False]


def test_what_depends_on_values_is_refused(policy: str):
    def look(module: object, args: object, kwargs: dict[str, Tensor]) -> None:
        bool(kwargs["input_ids"].sum())

    found = blueprint(policy)
    found.hf.base_model.register_forward_pre_hook(look, with_kwargs=True)
    with pytest.raises(UserError, match=r"cannot be planned: .* depends on values, not on shapes alone .* --dry-run"):
        found.inference(PlannedBatch(8, 32, 100))
