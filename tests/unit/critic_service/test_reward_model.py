"""The reward model where it rests in host memory."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from nemo_style_rlhf.critic_service.batches import Batches
from nemo_style_rlhf.critic_service.protocol import InferRequest
from nemo_style_rlhf.critic_service.reward_model import RewardModel
from nemo_style_rlhf.critic_service.worker_group import WorkerGroup
from nemo_style_rlhf.models.scalar import ScalarModel
from tests.support.addresses import addresses, addresses_in_use
from tests.support.models import SHAPE

pytestmark = pytest.mark.usefixtures("copying_device")
CPU = torch.device("cpu")
TOKENS, LENGTHS = torch.arange(1, 9), [5, 3]


def test_an_offloaded_reward_model_is_on_the_device_until_it_rests():
    model = ScalarModel(LlamaForSequenceClassification(LlamaConfig(**SHAPE, num_labels=1)))
    host, used = addresses(model), addresses_in_use(model)
    batches = Batches(micro_batch_tokens=64, row_multiple=1, pad_token_id=None, device=CPU)
    reward = RewardModel(model, None, batches, WorkerGroup(), offload=True)
    assert addresses(model) == host
    request = InferRequest(TOKENS.numpy(), np.array(LENGTHS))
    first = reward.rewards(request)
    assert not set(used[0]) & set(host)
    reward.rest()
    assert addresses(model) == host
    assert np.array_equal(reward.rewards(request), first)
