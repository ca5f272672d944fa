"""Direct preference optimization: trains the policy itself on preference pairs, and keeps it close to the initial model."""

from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nemo_style_rlhf.algorithms.preference_loss import dpo_loss
from nemo_style_rlhf.data.supervised import load_pairs
from nemo_style_rlhf.launch.follow_up import after_preferences
from nemo_style_rlhf.models.policy import PolicyModel
from nemo_style_rlhf.schema.supervised import DPOConfig
from nemo_style_rlhf.supervised.models import starting_policy
from nemo_style_rlhf.supervised.module import Sums, SupervisedModule
from nemo_style_rlhf.supervised.preference_batches import DPOBatch, collate_dpo
from nemo_style_rlhf.supervised.reference import FrozenReference, response_logprobs
from nemo_style_rlhf.supervised.stage import Stage


class DPOModule(SupervisedModule):
    """Computes both responses of a pair in one forward of the policy and one of the reference."""

    def __init__(self, hf: PreTrainedModel, config: DPOConfig, total_steps: int) -> None:
        super().__init__(config.engine, total_steps)
        self.dpo = config
        self.policy = PolicyModel(hf, temperature=1.0, compile_backbone=config.model.compile)
        self.reference = FrozenReference(self.policy, compile_backbone=config.model.compile)

    def losses(self, batch: DPOBatch) -> tuple[Tensor, int, Sums]:
        logprobs = response_logprobs(self.policy, batch.input_ids, batch.action_mask)
        reference = self.reference.logprobs(batch.input_ids, batch.action_mask)
        lengths = batch.action_mask.sum(1).clamp(min=1)
        # With the square of a sum over tokens, long responses would count most.
        divisor = lengths if self.dpo.loss == "ipo" else 1
        loss = dpo_loss(
            *(logprobs / divisor).chunk(2),
            *(reference / divisor).chunk(2),
            beta=self.dpo.beta,
            label_smoothing=self.dpo.label_smoothing,
            kind=self.dpo.loss,
        )
        pairs = len(logprobs) // 2
        nll = -(logprobs / lengths)[:pairs].sum()
        with torch.no_grad():
            chosen, rejected = (self.dpo.beta * (logprobs - reference)).chunk(2)
            chosen_logprobs, rejected_logprobs = logprobs.chunk(2)
            sums: Sums = {
                "rewards/chosen": chosen.sum(),
                "rewards/rejected": rejected.sum(),
                "rewards/accuracies": (chosen > rejected).float().sum(),
                "rewards/margins": (chosen - rejected).sum(),
                "logps/chosen": chosen_logprobs.sum(),
                "logps/rejected": rejected_logprobs.sum(),
                "nll": nll.detach(),
            }
        return loss * pairs + self.dpo.nll_weight * nll, pairs, sums


def train_dpo(config: DPOConfig) -> dict[str, float]:
    """Train, validate and export; returns the validation metrics."""
    stage = Stage(config, config.data, load_pairs, collate_dpo, name="DPO", then=partial(after_preferences, config))
    hf = starting_policy(config.model)
    metrics = stage.fit(DPOModule(hf, config, stage.total_steps), hf)
    stage.export(hf)
    return metrics
