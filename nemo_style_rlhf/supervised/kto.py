"""Kahneman-Tversky optimization: trains the policy on single responses that were judged desirable or not."""

import logging
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nemo_style_rlhf.algorithms.preference_loss import kto_loss
from nemo_style_rlhf.data.examples import UnpairedExample
from nemo_style_rlhf.data.supervised import load_unpaired
from nemo_style_rlhf.launch.follow_up import after_preferences
from nemo_style_rlhf.models.policy import PolicyModel
from nemo_style_rlhf.schema.supervised import KTOConfig
from nemo_style_rlhf.supervised.models import starting_policy
from nemo_style_rlhf.supervised.module import Sums, SupervisedModule
from nemo_style_rlhf.supervised.preference_batches import KTOBatch, MismatchedPairs, collate_kto
from nemo_style_rlhf.supervised.reference import FrozenReference, response_logprobs
from nemo_style_rlhf.supervised.stage import Stage

logger = logging.getLogger(__name__)


class KTOModule(SupervisedModule):
    """Compares responses with the KL, estimated once per optimizer step from all its rows.

    The estimate carries no gradient and the weights do not change until the step's end, so the first micro-batch's estimate
    holds for all of them, and the split of a step into micro-batches or over ranks changes neither its loss nor its gradient.
    Validation uses one estimate from all validation rows, whatever its batch size.
    """

    def __init__(self, hf: PreTrainedModel, config: KTOConfig, total_steps: int) -> None:
        super().__init__(config.engine, total_steps)
        self.kto = config
        self.policy = PolicyModel(hf, temperature=1.0, compile_backbone=config.model.compile)
        self.reference = FrozenReference(self.policy, compile_backbone=config.model.compile)
        self._kl: Tensor | None = None
        """Estimate for the optimizer step or validation under way; None outside of training, where each batch makes its own."""
        self._estimated_for = -1
        """Optimizer step for which ``_kl`` was estimated."""

    def training_step(self, batch: KTOBatch, batch_index: int) -> Tensor:
        step = batch_index // self.trainer.accumulate_grad_batches
        if step != self._estimated_for:
            self._kl, self._estimated_for = self._kl_of_all_ranks(batch.mismatched), step
        return super().training_step(batch, batch_index)

    def validation_step(self, batch: KTOBatch, batch_index: int) -> None:
        if batch_index == 0:
            self._kl = self._kl_of_all_ranks(batch.mismatched.of(self.trainer.val_dataloaders.dataset.rows))
        super().validation_step(batch, batch_index)

    def losses(self, batch: KTOBatch) -> tuple[Tensor, int, Sums]:
        kl = mean_kl(self.sum_ratios(batch.mismatched)) if self._kl is None else self._kl
        logprobs = response_logprobs(self.policy, batch.input_ids, batch.action_mask)
        reference = self.reference.logprobs(batch.input_ids, batch.action_mask)
        count, desirable = len(logprobs), int(batch.desirable.sum())
        loss = kto_loss(
            logprobs,
            reference,
            kl,
            batch.desirable,
            beta=self.kto.beta,
            desirable_weight=self.kto.desirable_weight,
            undesirable_weight=self.kto.undesirable_weight,
        )
        with torch.no_grad():
            rewards = self.kto.beta * (logprobs - reference)
            sums: Sums = {
                "rewards/desirable": (rewards[batch.desirable].sum(), desirable),
                "rewards/undesirable": (rewards[~batch.desirable].sum(), count - desirable),
                "kl": kl * count,
            }
        return loss * count, count, sums

    def _kl_of_all_ranks(self, pairs: MismatchedPairs) -> Tensor:
        sums = self.sum_ratios(pairs, rank=self.global_rank, ranks=self.trainer.world_size)
        return mean_kl(self.trainer.strategy.reduce(sums, reduce_op="sum"))

    @torch.no_grad()
    def sum_ratios(self, pairs: MismatchedPairs, *, rank: int = 0, ranks: int = 1) -> Tensor:
        """[2] float32: the sum of log-ratios over one rank's part of ``pairs``, in nats, and their number. Without dropout."""
        sums = torch.zeros(2, device=self.device)
        training = self.policy.training
        self.policy.eval()
        for texts in pairs.micro_batches(rank, ranks):
            input_ids, mask = texts.input_ids.to(self.device), texts.action_mask.to(self.device)
            ratios = response_logprobs(self.policy, input_ids, mask) - self.reference.logprobs(input_ids, mask)
            sums += torch.stack([ratios.sum(), ratios.new_tensor(len(ratios))])
        self.policy.train(training)
        torch.clear_autocast_cache()  # else the training forward would reuse casts without gradient
        return sums


def mean_kl(sums: Tensor) -> Tensor:
    """KL(policy || reference) in nats per response, a scalar, at least 0; 0 if a single row left nothing to mismatch."""
    return (sums[0] / sums[1].clamp(min=1)).clamp(min=0)


def train_kto(config: KTOConfig) -> dict[str, float]:
    """Train, validate and export; returns the validation metrics."""
    collate = partial(collate_kto, fit=config.trainer, max_length=config.data.max_length)
    stage = Stage(config, config.data, load_unpaired, collate, name="KTO", then=partial(after_preferences, config))
    logger.info("%s", balance(stage.train_rows, config))
    hf = starting_policy(config.model)
    metrics = stage.fit(KTOModule(hf, config, stage.total_steps), hf)
    stage.export(hf)
    return metrics


def balance(rows: Sequence[UnpairedExample], config: KTOConfig) -> str:
    """Describe the numbers of desirable and undesirable rows, and their balance after weighting."""
    desirable = sum(row.desirable for row in rows)
    undesirable = len(rows) - desirable
    text = f"{desirable} desirable and {undesirable} undesirable rows"
    if not desirable or not undesirable or not config.undesirable_weight:
        return text
    ratio = config.desirable_weight * desirable / (config.undesirable_weight * undesirable)
    return f"{text}, weighted {ratio:.2f} to 1 (the paper wants 1 to 1.33)"
