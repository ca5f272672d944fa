"""The reward model: a scalar score that prefers the chosen response (Bradley-Terry)."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from nemo_style_rlhf.algorithms.preference_loss import reward_model_loss
from nemo_style_rlhf.data.examples import PreferencePair
from nemo_style_rlhf.data.supervised import load_pairs
from nemo_style_rlhf.launch.follow_up import after_reward_model
from nemo_style_rlhf.models.compiled import compile_forward
from nemo_style_rlhf.models.scalar import ScalarModel, sequence_scores, set_reward_statistics
from nemo_style_rlhf.schema.supervised import RewardModelConfig, SupervisedEngineConfig
from nemo_style_rlhf.supervised.batches import PairBatch, collate_pairs
from nemo_style_rlhf.supervised.models import starting_reward_model
from nemo_style_rlhf.supervised.module import Sums, SupervisedModule
from nemo_style_rlhf.supervised.pair_evaluation import evaluation
from nemo_style_rlhf.supervised.stage import Stage


class RewardModelModule(SupervisedModule):
    """Scores both responses of a pair in one forward."""

    def __init__(
        self, model: ScalarModel, config: SupervisedEngineConfig, total_steps: int, loss: str, centring: float = 0.0
    ) -> None:
        super().__init__(config, total_steps)
        self.model = model
        self.loss, self.centring = loss, centring

    def scores(self, batch: PairBatch) -> Tensor:
        """[2B] scores of the chosen texts, then of the rejected ones."""
        positions = torch.arange(batch.input_ids.shape[1], device=batch.lengths.device)
        attention_mask = (positions < batch.lengths[:, None]).long()
        token_scores = self.model(batch.input_ids, attention_mask)
        return sequence_scores(token_scores, batch.input_ids, batch.lengths, self.model.hf.config.pad_token_id)

    def losses(self, batch: PairBatch) -> tuple[Tensor, int, Sums]:
        scores = self.scores(batch)
        chosen, rejected = scores.chunk(2)
        loss = reward_model_loss(chosen, rejected, margin=batch.margins, kind=self.loss, centring=self.centring)
        with torch.no_grad():
            means: Sums = {
                "pair_accuracy": (chosen > rejected).float().sum(),
                "margin": (chosen - rejected).sum(),
                "score": scores.sum() / 2,
            }
        return loss * len(chosen), len(chosen), means


def train_reward_model(config: RewardModelConfig) -> dict[str, float]:
    """Train, validate and export; returns the validation metrics."""
    then = partial(after_reward_model, config)
    stage = Stage(config, config.data, load_pairs, collate_pairs, name="reward model", then=then)
    model = starting_reward_model(config.model, stage.tokenizer)
    if config.model.compile:
        compile_forward(model.hf.base_model)
    module = RewardModelModule(model, config.engine, stage.total_steps, config.loss, config.centring)
    metrics = stage.fit(module, model.hf)
    if not config.run.dry_run and stage.is_first_rank:
        if config.statistics_pairs:
            chosen, rejected, _ = _rewards(module, stage, stage.sample(config.statistics_pairs))
            rewards = torch.cat([chosen, rejected])
            set_reward_statistics(model.hf.config, float(rewards.mean()), float(rewards.std(correction=0)))
        if stage.val_rows:
            path = Path(config.run.output_dir) / "pair_evaluation.json"
            path.write_text(json.dumps(evaluation(*_rewards(module, stage, stage.val_rows)), indent=1) + "\n")
    stage.export(model.hf)
    return metrics


@torch.no_grad()
def _rewards(
    module: RewardModelModule, stage: Stage, pairs: Sequence[PreferencePair]
) -> tuple[Tensor, Tensor, list[str]]:
    """Rewards of the chosen and of the rejected responses, float64 [pairs], and the subsets of the pairs."""
    module.to(stage.device).eval()  # Lightning leaves the module on the CPU after a fit
    rows, scores = [], []
    with stage.autocast():
        for part, batch in stage.on_device(pairs):
            rows += part
            scores.append(torch.stack(module.scores(batch).double().cpu().chunk(2)))
    chosen, rejected = torch.cat(scores, dim=1)
    return chosen, rejected, [row.subset for row in rows]
