"""Frozen weights in host memory: on the device while they are used, and never copied back."""

import pytest
import torch
from torch import nn

from nemo_style_rlhf.models.host_copy import HostCopy
from tests.support.addresses import addresses

pytestmark = pytest.mark.usefixtures("copying_device")
CPU = torch.device("cpu")


def test_parameters_and_buffers_come_back_to_the_same_memory():
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    state, host = {name: tensor.clone() for name, tensor in module.state_dict().items()}, addresses(module)
    copy = HostCopy(module, CPU)
    for _ in range(2):
        assert addresses(module) == host
        copy.load()
        assert not set(addresses(module)) & set(host)
        assert module[2].weight is module[0].weight
        assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
        copy.rest()
    assert addresses(module) == host
