"""Peaks of code on tensors without memory, against sums by hand."""

import torch
from torch import nn

from nemo_style_rlhf.planning.tracing import LiveBytes, shapes_only


def linear_stack(width: int, layers: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def test_nothing_is_allocated():
    module = linear_stack(2**17, 3)  # 64 GiB each
    with shapes_only(module):
        assert module(torch.empty(8, 2**17)).shape == (8, 2**17)


def test_tied_parameters_stay_one():
    module = linear_stack(16, 2)
    module[1].weight = module[0].weight
    shapes_only(module)
    assert module[1].weight is module[0].weight
    assert len(list(module.parameters())) == 1


def test_a_forward_keeps_every_input_for_its_backward():
    # 4 rows of 16 fp32 are 256 bytes: the input, and the output of each of three layers.
    module = linear_stack(16, 3)
    mode, live = shapes_only(module), LiveBytes(lambda _: "all")
    live.ignore(module)
    with mode, live:
        module(torch.empty(4, 16, requires_grad=True))
    assert live.peak == {"all": 4 * 256}


def test_without_gradients_only_two_layers_are_there_at_a_time():
    module = linear_stack(16, 3)
    mode, live = shapes_only(module), LiveBytes(lambda _: "all")
    live.ignore(module)
    with mode, torch.no_grad(), live:
        hidden = torch.empty(4, 16)
        for layer in module:
            hidden = layer(hidden)
    assert live.peak == {"all": 2 * 256}


def test_a_tensor_can_become_another_kind():
    module = linear_stack(16, 1)
    live = LiveBytes(lambda _: "before")
    with shapes_only(module), live:
        first = torch.empty(4, 16)
        live.rename(first, "after")
        second = torch.empty(4, 16)
    assert live.peak == {"before": 256, "after": 256}
    del second
