"""What the LightningModules of the supervised stages share: optimizer, loss of an optimizer step, metrics."""

from abc import ABC, abstractmethod
from collections import Counter
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from nemo_style_rlhf.engine.schedule import lr_factor
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.supervised import SupervisedEngineConfig


class SupervisedModule(pl.LightningModule, ABC):
    """A subclass says what a batch costs: :meth:`losses`.

    The loss of an optimizer step is its summed loss over its count (tokens or pairs), however it is split into
    micro-batches.
    """

    def __init__(self, config: SupervisedEngineConfig, total_steps: int) -> None:
        super().__init__()
        self.config = config
        self.total_steps = total_steps
        self._sums: Counter[str] = Counter()

    @abstractmethod
    def losses(self, batch: Any) -> tuple[Tensor, int, dict[str, Tensor]]:
        """The summed loss of ``batch`` (scalar), how many tokens or pairs it sums, and other sums to be averaged alike."""

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        loss, count, others = self.losses(batch)
        self._sums.update(
            {"loss": loss.item(), "count": count} | {name: value.item() for name, value in others.items()}
        )
        # Lightning divides by the number of micro-batches; the step's own count is the right divisor.
        return loss / batch.step_count * self.trainer.accumulate_grad_batches

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in self.parameters() if weight.grad is not None])
        if not torch.isfinite(norm):
            raise UserError(
                f"the gradient of step {self.global_step} is not finite: lower engine.optim.lr or check the data"
            )
        if self.config.gradient_clip_val:  # here, because Lightning refuses to clip for fused optimizers
            torch.nn.utils.clip_grads_with_norm_(self.parameters(), self.config.gradient_clip_val, norm)
        count = self._sums.pop("count")
        self.log_dict({f"train/{name}": total / count for name, total in self._sums.items()})
        self.log_dict({"train/grad_norm": norm, "train/lr": optimizer.param_groups[0]["lr"]})
        self._sums.clear()

    def validation_step(self, batch: Any, batch_index: int) -> None:
        loss, count, others = self.losses(batch)
        means = {f"val/{name}": total / count for name, total in ({"loss": loss} | others).items()}
        self.log_dict(means, batch_size=count, on_epoch=True)

    def configure_optimizers(self) -> Any:
        optim = self.config.optim
        optimizer = torch.optim.AdamW(
            self.parameters(),
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )
        total = self.config.scheduler.total_steps or self.total_steps
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: lr_factor(step, self.config.scheduler, total)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
