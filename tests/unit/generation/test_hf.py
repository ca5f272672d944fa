"""The generator of transformers samples under every possible setting, and refuses those that it does not know."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_style_rlhf.generation.hf import HFGenerator
from nemo_style_rlhf.generation.interface import GenerationRequest, ProbeTarget, SampleId, TransferError
from nemo_style_rlhf.generation.transfer import OwnWeights, shapes_of
from nemo_style_rlhf.schema.generation import GenerationConfig, SamplingOverrides


@pytest.fixture(scope="module")
def generator() -> HFGenerator:
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    model, config = LlamaForCausalLM(shape), GenerationConfig(backend="hf")
    return HFGenerator(model, config, device=torch.device("cpu"), eos_token_ids=[], weight_shapes={})


def sample(generator: HFGenerator, **own: object) -> list[int]:
    stream = generator.stream(0)
    stream.submit([GenerationRequest(SampleId(0, 0, 0), (3, 4), 7, 20, SamplingOverrides(**own))])  # type: ignore[arg-type]
    (completion,) = stream.completed()
    return completion.token_ids.tolist()


@pytest.mark.parametrize("top_k", [16, 17, 2**70])
def test_a_top_k_beyond_the_vocabulary_cuts_nothing(generator: HFGenerator, top_k: int) -> None:
    assert sample(generator, top_k=top_k) == sample(generator, top_k=0) != sample(generator, top_k=1)


def test_the_smallest_top_p_keeps_the_likeliest_token(generator: HFGenerator) -> None:
    assert sample(generator, top_p=1e-320) == sample(generator, top_k=1)


def test_the_bounds_of_the_temperature_leave_a_distribution(generator: HFGenerator) -> None:
    assert sample(generator, temperature=1e-5) == sample(generator, top_k=1) != sample(generator, temperature=1e5)


def test_stop_strings_are_refused(generator: HFGenerator) -> None:
    with pytest.raises(ValueError, match="hf knows no stop strings"):
        sample(generator, stop=("a",))
    assert generator.running == 0


def test_a_minimal_length_bans_the_rows_own_stop_tokens_too(generator: HFGenerator) -> None:
    first = sample(generator)[0]
    assert sample(generator, stop_token_ids=(first,)) == [first]
    longer = sample(generator, stop_token_ids=(first,), min_length=6)
    assert first not in longer[:6] and len(longer) >= 7


def test_it_holds_no_weights_while_it_sleeps(generator: HFGenerator) -> None:
    weights = {name: tensor.clone() for name, tensor in generator._model.state_dict().items()}
    before = sample(generator)
    generator.sleep()
    generator.sleep()
    assert not any(each.untyped_storage().nbytes() for each in generator._model.parameters())
    with pytest.raises(TransferError, match="the generator sleeps"):
        sample(generator)
    generator.expect(shapes_of(weights.items()))
    probe = ProbeTarget(((1, 2),), (torch.zeros(1),), 10.0)
    generator.load(OwnWeights(0, iter(weights.items()), probe))
    assert sample(generator) == before
