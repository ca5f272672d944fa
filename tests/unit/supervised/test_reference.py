"""The policy that DPO compares with."""

from pathlib import Path

import torch

from nemo_style_rlhf.models.loading import load_causal_lm
from nemo_style_rlhf.models.lora import add_lora
from nemo_style_rlhf.models.policy import PolicyModel
from nemo_style_rlhf.schema.common import LoRAConfig, ModelConfig
from nemo_style_rlhf.supervised.reference import FrozenReference, response_logprobs
from tests.support.models import disturb, save_policy


def test_the_reference_of_dpo_is_the_policy_without_its_adapter(tmp_path: Path) -> None:
    path = save_policy(tmp_path / "policy", attention_dropout=0.3)
    settings = ModelConfig(str(path), dtype="float32", disable_dropout=False, lora=LoRAConfig(rank=4))
    ids = torch.arange(2, 14).view(2, 6)
    actions = torch.ones_like(ids)
    actions[:, -1] = 0
    copied = FrozenReference(PolicyModel(load_causal_lm(settings), temperature=1.0), compile_backbone=False)
    model = load_causal_lm(settings)
    add_lora(model, settings)
    policy = PolicyModel(model, temperature=1.0).train()
    reference = FrozenReference(policy, compile_backbone=False)
    disturb(model)
    assert torch.equal(reference.logprobs(ids, actions), copied.logprobs(ids, actions))
    assert policy.training
    assert not torch.equal(response_logprobs(policy.eval(), ids, actions), copied.logprobs(ids, actions))
