"""Supervised fine-tuning: maximum likelihood of the responses."""

from torch import Tensor
from transformers import PreTrainedModel

from nemo_style_rlhf.data.supervised import load_sft
from nemo_style_rlhf.launch.follow_up import after_sft
from nemo_style_rlhf.models.policy import PolicyModel
from nemo_style_rlhf.schema.supervised import SFTConfig, SupervisedEngineConfig
from nemo_style_rlhf.supervised.batches import SFTBatch, collate_sft
from nemo_style_rlhf.supervised.models import starting_policy
from nemo_style_rlhf.supervised.module import Sums, SupervisedModule
from nemo_style_rlhf.supervised.stage import Stage


class SFTModule(SupervisedModule):
    """Mean negative log-likelihood per loss token, in nats."""

    def __init__(
        self, hf: PreTrainedModel, config: SupervisedEngineConfig, total_steps: int, compile_backbone: bool
    ) -> None:
        super().__init__(config, total_steps)
        self.policy = PolicyModel(hf, temperature=1.0, compile_backbone=compile_backbone)

    def losses(self, batch: SFTBatch) -> tuple[Tensor, int, Sums]:
        logprobs = self.policy(batch.input_ids, batch.action_mask).logprobs
        return -logprobs.sum(), logprobs.numel(), {}


def train_sft(config: SFTConfig) -> dict[str, float]:
    """Train, validate and export; returns the validation metrics."""
    stage = Stage(config, config.data, load_sft, collate_sft, name="SFT", then=lambda _: after_sft(config))
    hf = starting_policy(config.model)
    module = SFTModule(hf, config.engine, stage.total_steps, config.model.compile)
    metrics = stage.fit(module, hf)
    stage.export(hf)
    return metrics
