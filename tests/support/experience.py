"""A tiny policy and eight samples of experience with a random signal."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_style_rlhf.algorithms.corrections import importance_weights
from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.data.ragged import pad, unpad
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, SampleId
from nemo_style_rlhf.models.policy import PolicyModel
from nemo_style_rlhf.rollout.logprobs import action_mask
from nemo_style_rlhf.rollout.types import Experience, Rollout
from nemo_style_rlhf.schema.algorithm import AlgorithmConfig
from nemo_style_rlhf.scoring.interface import Scores
from tests.support.models import SHAPE

MAX_LENGTH = 12


def policy(attention: str) -> PolicyModel:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation=attention)).double()
    return PolicyModel(model, temperature=0.8)


def experience(config: AlgorithmConfig) -> Experience:
    """Eight samples of unequal lengths, one of them masked, with a random signal."""
    generator = torch.Generator().manual_seed(1)
    rollouts = []
    for index in range(8):
        request = GenerationRequest(SampleId(1, index, 0), tuple(range(1, 3 + index % 3)), 0, MAX_LENGTH)
        tokens = torch.randint(64, (3 + index,), generator=generator)
        completion = Completion(request, tokens, torch.zeros(len(tokens)), "stop", 0)
        rollouts.append(Rollout.from_completion(completion, Prompt(index, list(request.prompt), "")))
    lengths = [len(rollout.tokens) for rollout in rollouts]
    mask = action_mask(rollouts)
    mask[: lengths[0]] = 0
    mask[sum(lengths[:5]) - 3] = 0  # a gap

    def random(scale: float = 0.3) -> torch.Tensor:
        return scale * torch.randn(sum(lengths), dtype=torch.float64, generator=generator)

    old = random() - 4
    weights = importance_weights(
        pad(old, lengths), pad(old + random(), lengths), pad(mask, lengths), kind="tis", low=0, high=2
    )
    return Experience(
        rollouts=rollouts, lengths=lengths, temperatures=torch.linspace(0.5, 1.5, 8),
        tokens=torch.cat([rollout.tokens for rollout in rollouts]), mask=mask, sampler_logprobs=old, logprobs=old,
        ref_logprobs=old + random(), scores=Scores(torch.zeros(8)), kl=random(), kl_coef=0.1, advantages=random(1),
        rewards=torch.empty(0), returns=None, correction=unpad(weights, lengths), counts={},
    )  # fmt: skip
