"""Started by test_ranks.py under torchrun: computes an actor's update over these ranks, in float64 if ZeRO allows it, and the
losses of actor and critic at its first optimizer step without DeepSpeed, always in float64."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf
from transformers import LlamaConfig, LlamaForSequenceClassification

from nemo_style_rlhf.algorithms.value_loss import value_loss
from nemo_style_rlhf.critic_service.batches import Batches
from nemo_style_rlhf.critic_service.protocol import InferRequest
from nemo_style_rlhf.critic_service.worker_group import WorkerGroup
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.engine.process_group import init_distributed
from nemo_style_rlhf.launch.composition import CONF_DIR
from nemo_style_rlhf.models.packing import PACKED_ATTENTION
from nemo_style_rlhf.models.policy import PolicyModel
from nemo_style_rlhf.models.scalar import ScalarModel
from nemo_style_rlhf.ppo.update import episode_sizes, loss_normalizer, micro_batch_loss, samples_per_step, update_actor
from nemo_style_rlhf.rollout.logprobs import micro_batch_iterator
from nemo_style_rlhf.rollout.types import Experience
from nemo_style_rlhf.schema.algorithm import AlgorithmConfig
from nemo_style_rlhf.schema.base import build
from nemo_style_rlhf.schema.common import EngineConfig, OptimizerConfig
from tests.support.experience import MAX_LENGTH, experience, policy
from tests.support.models import SHAPE

PLAN = [[0, 1, 2, 3, 4], [5, 6, 7, 2], [1]]
"""Rows of each optimizer step. In the last step, all ranks but one have nothing to compute."""


def main(preset: str, zero_stage: int, output: Path) -> None:
    torch.set_num_threads(1)
    init_distributed(torch.device("cpu"))
    config = build(AlgorithmConfig, OmegaConf.load(CONF_DIR / "algorithm" / f"{preset}.yaml"))
    engine_config = EngineConfig(
        zero_stage=zero_stage,
        micro_batch_tokens=48,
        row_multiple=1,
        optim=OptimizerConfig(lr=1e-2),
        gradient_clip_val=0.1,
    )
    ranks, seen = Ranks(), experience(config)
    model = policy(PACKED_ATTENTION)
    losses = [loss_without_deepspeed(model, seen, config, engine_config, ranks), critic_loss_without_deepspeed()]
    if zero_stage == 0:
        model.float()  # DeepSpeed's plain reduction does not support float64
    engine = Engine(model, engine_config, device=torch.device("cpu"))
    metrics = update_actor(engine, seen, PLAN, config, ranks, max_length=MAX_LENGTH, seed=0)
    weights = torch.cat([weight.flatten() for _, weight in engine.named_weights()])
    if ranks.is_first:
        torch.save(weights, output.with_suffix(".pt"))
        output.write_text(json.dumps([metrics, losses]))


@torch.no_grad()
def loss_without_deepspeed(
    model: PolicyModel, seen: Experience, config: AlgorithmConfig, engine_config: EngineConfig, ranks: Ranks
) -> float:
    batches = micro_batch_iterator(
        seen.tokens, seen.lengths, seen.mask, engine_config, torch.device("cpu"), ranks, PLAN[0]
    )
    samples = samples_per_step(seen, PLAN)[0]
    normalizer = loss_normalizer(
        episode_sizes(seen), PLAN[0], config.loss_aggregation, samples=samples, max_length=MAX_LENGTH
    )
    losses = [float(micro_batch_loss(model, seen, batch, config, normalizer)[0]) for batch, counts in batches if counts]
    return sum(ranks.all_gather(sum(losses)))


@torch.no_grad()
def critic_loss_without_deepspeed() -> float:
    """Loss of seven sequences in micro-batches of at most 48 tokens, formed and shared as in critic_service/worker.py."""
    draw = np.random.default_rng(0)
    lengths = [12, 3, 20, 7, 16, 5, 9]
    torch.manual_seed(0)
    model = ScalarModel(LlamaForSequenceClassification(LlamaConfig(**SHAPE, num_labels=1))).double()
    request = InferRequest(draw.integers(1, 60, sum(lengths)).astype(np.int32), np.array(lengths, dtype=np.int32))
    arrays = [draw.normal(size=sum(lengths)), draw.normal(size=sum(lengths)), draw.integers(0, 2, sum(lengths)) * 1.0]
    group, loss = WorkerGroup(), 0.0
    batches = Batches(
        micro_batch_tokens=48, row_multiple=1, pad_token_id=0, device=torch.device("cpu"), ranks=group.size
    )
    share = batches.shares(request.lengths)[group.rank]
    own = share.of(request)
    for rows, counts in share.steps[0]:
        old_values, returns, mask = (batches.padded(share.pick(array, request), own, rows) for array in arrays)
        values = model(*batches.inputs(own, rows)).double()
        result = value_loss(values, old_values, returns, mask, clip=0.2, normalizer=float(arrays[2].sum()))
        loss += float(result.loss) * counts
    return sum(group.all_gather(loss))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
