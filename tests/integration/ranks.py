"""Started by test_ranks.py under torchrun: two optimizer steps on this rank's share of a batch, in float64."""

import json
import sys
from pathlib import Path

import torch
from omegaconf import OmegaConf

from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.launch.bootstrap import init_distributed
from nemo_style_rlhf.launch.entry import CONF_DIR
from nemo_style_rlhf.ppo.update import loss_normalizer, micro_batch_loss
from nemo_style_rlhf.rollout.logprobs import micro_batch_iterator
from nemo_style_rlhf.schema.algorithm import AlgorithmConfig
from nemo_style_rlhf.schema.base import build
from nemo_style_rlhf.schema.common import EngineConfig, OptimizerConfig
from tests.unit.test_invariance import MAX_LENGTH, experience, policy


def main(preset: str, zero_stage: int, output: Path) -> None:
    torch.set_num_threads(1)
    init_distributed(torch.device("cpu"))
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    config = build(AlgorithmConfig, OmegaConf.load(CONF_DIR / "algorithm" / f"{preset}.yaml"))
    engine_config = EngineConfig(
        zero_stage=zero_stage,
        micro_batch_tokens=48,
        row_multiple=1,
        optim=OptimizerConfig(lr=1e-2),
        gradient_clip_val=0.1,
    )
    engine = Engine(policy("eager"), engine_config, device=torch.device("cpu"))
    batch = experience(config)

    def micro_batches(rows):
        return list(
            micro_batch_iterator(
                batch.tokens, batch.lengths, batch.mask, engine_config, engine.device, rows, batch.temperatures
            )
        )

    norms = []
    for rows in ([0, 1, 2, 3, 4], [5, 6, 7, 2]):
        normalizer = loss_normalizer(micro_batches(rows), config.loss_aggregation, max_length=MAX_LENGTH)
        for part in micro_batches(rows[rank::ranks]):
            loss, _ = micro_batch_loss(engine, batch, part, config, normalizer)
            engine.backward(loss)
        norms.append(engine.step().grad_norm)
    weights = torch.cat([parameter.detach().flatten() for parameter in engine.module.parameters()])
    if rank == 0:
        torch.save(weights, output.with_suffix(".pt"))
        output.write_text(json.dumps(norms))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
