"""bf16 products in fp32, where a CPU would emulate them."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from nemo_style_rlhf.models import cpu_linear

BATCH, TIME, INPUTS, OUTPUTS = 3, 7, 32, 48
ONE_PRODUCT = 2 * BATCH * TIME * INPUTS * OUTPUTS


@pytest.fixture
def layer(monkeypatch):
    monkeypatch.setattr(cpu_linear, "CPU_EMULATES_BF16", True)
    torch.manual_seed(0)
    layer = nn.Linear(INPUTS, OUTPUTS).bfloat16()
    cpu_linear.use_fp32_products(layer)
    return layer


def test_every_product_is_that_of_fp32_rounded_once(layer):
    input = torch.randn(BATCH, TIME, INPUTS).bfloat16().requires_grad_()
    grad = torch.randn(BATCH, TIME, OUTPUTS).bfloat16()
    exact = nn.Linear(INPUTS, OUTPUTS)
    exact.load_state_dict({name: tensor.float() for name, tensor in layer.state_dict().items()})
    exact_input = input.detach().float().requires_grad_()
    output, expected = layer(input), exact(exact_input)
    output.backward(grad)
    expected.backward(grad.float())
    for ours, theirs in (  # bf16 has 8 bits; sums in another order may round to the neighbour
        (output, expected),
        (input.grad, exact_input.grad),
        (layer.weight.grad, exact.weight.grad),
        (layer.bias.grad, exact.bias.grad),
    ):
        torch.testing.assert_close(ours, theirs.bfloat16(), rtol=0.008, atol=1e-5)


def test_only_gradients_that_someone_wants_are_computed(layer):
    layer.requires_grad_(False)  # as LoRA leaves it
    input = torch.randn(BATCH, TIME, INPUTS).bfloat16().requires_grad_()
    kept = []
    with FlopCounterMode(display=False) as flops:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            output = layer(input)
        output.sum().backward()
    assert flops.get_total_flops() == 2 * ONE_PRODUCT
    assert [t.data_ptr() for t in kept] == [layer.weight.data_ptr()]
