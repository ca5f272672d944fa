"""Frozen weights in host memory: on the device while they are used, and never copied back."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from nemo_style_rlhf.critic_service.batches import Batches
from nemo_style_rlhf.critic_service.protocol import InferRequest
from nemo_style_rlhf.critic_service.reward_model import RewardModel, Score
from nemo_style_rlhf.critic_service.worker_group import WorkerGroup
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.models.host_copy import HostCopy
from nemo_style_rlhf.models.policy import PolicyModel
from nemo_style_rlhf.models.scalar import ScalarModel
from nemo_style_rlhf.rollout.reference import FrozenCopy
from nemo_style_rlhf.schema.common import EngineConfig
from tests.support.models import SHAPE

CPU = torch.device("cpu")
TOKENS, LENGTHS = torch.arange(1, 9), [5, 3]


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moving a tensor to the CPU copies it, as to another device."""
    to: Callable[..., Tensor] = Tensor.to

    def copied(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
        moved = to(tensor, *args, **kwargs)
        return moved.clone() if args and isinstance(args[0], torch.device) else moved

    monkeypatch.setattr(Tensor, "to", copied)


def addresses(module: nn.Module) -> list[int]:
    return [tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers())]


def addresses_in_use(module: nn.Module) -> list[list[int]]:
    """Of each forward from now on."""
    found: list[list[int]] = []
    module.register_forward_pre_hook(lambda *_: found.append(addresses(module)))
    return found


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


def test_an_offloaded_reference_is_on_the_device_only_while_it_computes():
    model = PolicyModel(LlamaForCausalLM(LlamaConfig(**SHAPE)), temperature=1.0)
    host, used = addresses(model), addresses_in_use(model)
    reference = FrozenCopy(model, EngineConfig(), CPU, Ranks(), cpu_offload=True)
    for _ in range(2):
        assert reference.logprobs(TOKENS, LENGTHS, torch.ones(8)).all()
        assert addresses(model) == host
    assert len(used) == 2 and not set(used[0] + used[1]) & set(host)


def test_an_offloaded_reward_model_is_on_the_device_until_it_rests():
    model = ScalarModel(LlamaForSequenceClassification(LlamaConfig(**SHAPE, num_labels=1)))
    host, used = addresses(model), addresses_in_use(model)
    batches = Batches(micro_batch_tokens=64, row_multiple=1, pad_token_id=None, device=CPU)
    group = WorkerGroup()
    reward = RewardModel(model, None, batches, group, offload=True)
    assert addresses(model) == host
    request = InferRequest(TOKENS.numpy(), np.array(LENGTHS))
    first = group.run(Score(request))
    assert not set(used[0]) & set(host)
    reward.rest()
    assert addresses(model) == host
    assert np.array_equal(group.run(Score(request)), first)
