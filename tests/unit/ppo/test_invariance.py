"""The gradient of an optimizer step does not depend on how its samples are split or padded, for every preset's loss."""

import pytest
import torch
from omegaconf import OmegaConf
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_style_rlhf.algorithms.corrections import importance_weights
from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.data.ragged import pad, unpad
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, SampleId
from nemo_style_rlhf.launch.entry import CONF_DIR
from nemo_style_rlhf.models.packing import PACKED_ATTENTION
from nemo_style_rlhf.models.policy import PolicyModel
from nemo_style_rlhf.ppo.update import loss_normalizer, micro_batch_loss
from nemo_style_rlhf.rollout.logprobs import action_mask, micro_batch_iterator
from nemo_style_rlhf.rollout.types import Experience, Rollout
from nemo_style_rlhf.schema.algorithm import AlgorithmConfig
from nemo_style_rlhf.schema.base import build
from nemo_style_rlhf.schema.common import EngineConfig
from nemo_style_rlhf.scoring.interface import Scores
from tests.support.models import SHAPE

CPU = torch.device("cpu")
MAX_LENGTH = 12
PRESETS = sorted(path.stem for path in (CONF_DIR / "algorithm").glob("*.yaml"))
SPLITS = {
    "8 micro-batches": EngineConfig(micro_batch_tokens=24, row_multiple=1),
    "padded rows": EngineConfig(micro_batch_tokens=10_000, row_multiple=16),
    "micro-batches of padded rows": EngineConfig(micro_batch_tokens=64, row_multiple=3),
}
WHOLE = EngineConfig(micro_batch_tokens=10_000, row_multiple=1)


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
        tokens = torch.randint(64, (3 + index,), generator=generator).tolist()
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


def gradient(
    config: AlgorithmConfig, engine: EngineConfig, rows: list[int], attention: str = "eager"
) -> tuple[float, list[torch.Tensor]]:
    model, batch = policy(attention), experience(config)
    parts = list(micro_batch_iterator(batch.tokens, batch.lengths, batch.mask, engine, CPU, rows, batch.temperatures))
    normalizer = loss_normalizer(parts, config.loss_aggregation, samples=len(rows), max_length=MAX_LENGTH)
    total = 0.0
    for part in parts:
        loss, _ = micro_batch_loss(model, batch, part, config, normalizer)
        loss.backward()
        total += float(loss.detach())
    return total, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("preset", PRESETS)
def test_splitting_and_padding_change_neither_loss_nor_gradient(preset, split):
    config, rows = preset_config(preset), list(range(8))
    assert_same(gradient(config, WHOLE, rows), gradient(config, SPLITS[split], rows))


@pytest.mark.parametrize("preset", PRESETS)
def test_packing_changes_neither_loss_nor_gradient(preset):
    config, rows = preset_config(preset), list(range(8))
    split = SPLITS["micro-batches of padded rows"]
    assert_same(gradient(config, WHOLE, rows), gradient(config, split, rows, PACKED_ATTENTION))


def preset_config(preset: str) -> AlgorithmConfig:
    config = build(AlgorithmConfig, OmegaConf.load(CONF_DIR / "algorithm" / f"{preset}.yaml"))
    config.entropy_bonus, config.dual_clip = 0.01, 3.0
    return config


def assert_same(expected: tuple[float, list[torch.Tensor]], actual: tuple[float, list[torch.Tensor]]) -> None:
    assert actual[0] == pytest.approx(expected[0], rel=1e-6)
    assert sum(float(grad.abs().sum()) for grad in expected[1]) > 0
    for left, right in zip(expected[1], actual[1], strict=True):
        assert float((left - right).norm()) <= 1e-6 * float(left.norm())
