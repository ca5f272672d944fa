"""The reference model where it rests in host memory."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.models.policy import PolicyModel
from nemo_style_rlhf.rollout.reference import FrozenCopy
from nemo_style_rlhf.schema.common import EngineConfig
from tests.support.addresses import addresses, addresses_in_use
from tests.support.models import SHAPE

pytestmark = pytest.mark.usefixtures("copying_device")
CPU = torch.device("cpu")
TOKENS, LENGTHS = torch.arange(1, 9), [5, 3]


def test_an_offloaded_reference_is_on_the_device_only_while_it_computes():
    model = PolicyModel(LlamaForCausalLM(LlamaConfig(**SHAPE)), temperature=1.0)
    host, used = addresses(model), addresses_in_use(model)
    reference = FrozenCopy(model, EngineConfig(), CPU, Ranks(), cpu_offload=True)
    for _ in range(2):
        assert reference.logprobs(TOKENS, LENGTHS, torch.ones(8)).all()
        assert addresses(model) == host
    assert len(used) == 2 and not set(used[0] + used[1]) & set(host)
