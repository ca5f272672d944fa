"""The gradient of an optimizer step does not depend on how its samples are split or padded, for every preset's loss."""

import pytest
import torch
from omegaconf import OmegaConf

from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.launch.composition import CONF_DIR
from nemo_style_rlhf.models.packing import PACKED_ATTENTION
from nemo_style_rlhf.ppo.update import episode_sizes, loss_normalizer, micro_batch_loss
from nemo_style_rlhf.rollout.logprobs import micro_batch_iterator
from nemo_style_rlhf.schema.algorithm import AlgorithmConfig
from nemo_style_rlhf.schema.base import build
from nemo_style_rlhf.schema.common import EngineConfig
from tests.support.experience import MAX_LENGTH, experience, policy

CPU = torch.device("cpu")
PRESETS = sorted(path.stem for path in (CONF_DIR / "algorithm").glob("*.yaml"))
SPLITS = {
    "8 micro-batches": EngineConfig(micro_batch_tokens=24, row_multiple=1),
    "padded rows": EngineConfig(micro_batch_tokens=10_000, row_multiple=16),
    "micro-batches of padded rows": EngineConfig(micro_batch_tokens=64, row_multiple=3),
}
WHOLE = EngineConfig(micro_batch_tokens=10_000, row_multiple=1)


def gradient(
    config: AlgorithmConfig, engine: EngineConfig, rows: list[int], attention: str = "eager"
) -> tuple[float, list[torch.Tensor]]:
    model, batch = policy(attention), experience(config)
    parts = micro_batch_iterator(
        batch.tokens, batch.lengths, batch.mask, engine, CPU, Ranks(alone=True), rows, batch.temperatures
    )
    normalizer = loss_normalizer(
        episode_sizes(batch), rows, config.loss_aggregation, samples=len(rows), max_length=MAX_LENGTH
    )
    total = 0.0
    for part, _ in parts:
        loss, *_ = micro_batch_loss(model, batch, part, config, normalizer)
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
