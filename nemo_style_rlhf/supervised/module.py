"""Common base of the supervised stages' LightningModules: optimizer, loss of an optimizer step, metrics."""

import math
import time
from abc import ABC, abstractmethod
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DeepSpeedStrategy
from torch import Tensor

from nemo_style_rlhf.data.sampling import mixed_seed
from nemo_style_rlhf.engine.schedule import follow_config, lr_factor
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.supervised import SupervisedEngineConfig
from nemo_style_rlhf.supervised.checkpoints import IDENTITY, recount_micro_batches

Sums = dict[str, Tensor | tuple[Tensor, int]]
"""By metric: a sum that is divided like the loss, or a sum with its own divisor."""


class SupervisedModule(pl.LightningModule, ABC):
    """A subclass computes the loss of a batch: :meth:`losses`.

    The loss of an optimizer step is its summed loss divided by its count (tokens or pairs), however it is split into
    micro-batches.
    """

    def __init__(self, config: SupervisedEngineConfig, total_steps: int) -> None:
        super().__init__()
        self.config = config
        self.total_steps = total_steps
        self.seed = 0
        """Dropout seed; the stage sets it."""
        self.identity: dict[str, Any] = {}
        """Identity of the run, saved in every checkpoint; the stage sets it."""
        self.validates = False
        """True if there are validation rows; the stage sets it."""
        self._trained, self._validated = Tally(), Tally()
        self._stepped_at = self._grad_norm = 0.0
        self._validated_at = -1

    @abstractmethod
    def losses(self, batch: Any) -> tuple[Tensor, int, Sums]:
        """The summed loss of ``batch`` (scalar), its number of tokens or pairs, and the sums of other metrics."""

    @property
    def strict_loading(self) -> bool:
        """True if a checkpoint holds all weights; with adapters, it holds only the trained ones."""
        return all(parameter.requires_grad for parameter in self.parameters())

    def on_train_start(self) -> None:
        follow_config(self.lr_schedulers(), self.config.optim)
        self._stepped_at = time.perf_counter()

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        # Dropout depends only on seed and micro-batch, so that a resumed run needs no generator state.
        torch.manual_seed(mixed_seed(self.seed, batch_index, self.global_rank))
        loss, count, others = self.losses(batch)
        self._trained.add({"loss": loss, **others}, count)
        # Lightning divides by the numbers of micro-batches and ranks, but the step's own count is the right divisor.
        divisors = self.trainer.accumulate_grad_batches * self.trainer.world_size
        if self._zero is not None:  # DeepSpeed divides by the number of micro-batches once more
            divisors *= self.trainer.accumulate_grad_batches
        return loss / batch.step_count * divisors

    @property
    def _zero(self) -> DeepSpeedStrategy | None:
        """The strategy that shards gradients and clips them; None without ZeRO."""
        return self.trainer.strategy if isinstance(self.trainer.strategy, DeepSpeedStrategy) else None

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._zero is not None:
            return
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in self.parameters() if weight.grad is not None])
        self._grad_norm = float(norm)
        self._require_finite(self.global_step)
        if self.config.gradient_clip_val:  # here, because Lightning refuses to clip for fused optimizers
            torch.nn.utils.clip_grads_with_norm_(self.parameters(), self.config.gradient_clip_val, norm)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        step, lr = self.global_step, optimizer.param_groups[0]["lr"]
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches:
            return  # DeepSpeed is told of every micro-batch
        if self._zero is not None:
            self._grad_norm = float(self._zero.deepspeed_engine.get_global_grad_norm())
            self._require_finite(step)
        self.log_dict({f"train/{name}": mean for name, mean in self._means(self._trained).items()})
        self.log_dict({"train/grad_norm": self._grad_norm, "train/lr": lr})
        now = time.perf_counter()
        self.log("timers/step", now - self._stepped_at)
        self._stepped_at = now

    def _require_finite(self, step: int) -> None:
        if not math.isfinite(self._grad_norm):
            raise UserError(f"the gradient of step {step} is not finite: lower engine.optim.lr or check the data")

    def validation_step(self, batch: Any, batch_index: int) -> None:
        loss, count, others = self.losses(batch)
        self._validated.add({"loss": loss, **others}, count)

    def on_validation_epoch_end(self) -> None:
        self.log_dict({f"val/{name}": mean for name, mean in self._means(self._validated).items()})
        self._validated_at = self.global_step

    def on_train_end(self) -> None:
        """Validate the final weights, unless that has been done."""
        if self.validates and self._validated_at != self.global_step:
            self.trainer.validating = True
            self.trainer.fit_loop.epoch_loop.val_loop.run()
            self.trainer.training = True

    def _means(self, tally: "Tally") -> dict[str, float]:
        """The means over all ranks since the last call."""
        totals = self.trainer.strategy.reduce(tally.totals().to(self.device), reduce_op="sum").tolist()
        means = {name: total / count for name, (total, count) in zip(tally.sums, totals, strict=True) if count}
        tally.clear()
        return means

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[IDENTITY] = self.identity
        named = self.named_parameters(remove_duplicate=False)
        frozen = {name for name, parameter in named if not parameter.requires_grad}
        for name in frozen:  # with adapters, the base model is on disk already
            del checkpoint["state_dict"][name]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Reopen a run that was made longer since: otherwise Lightning would consider its data finished and train nothing."""
        recount_micro_batches(checkpoint, per_step=self.trainer.accumulate_grad_batches)
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        progress["is_last_batch"] = checkpoint["global_step"] >= self.total_steps

    def configure_optimizers(self) -> Any:
        optim = self.config.optim
        optimizer = torch.optim.AdamW(
            [parameter for parameter in self.parameters() if parameter.requires_grad],
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


class Tally:
    """Sums of metrics with their divisors. (Lightning's own weighted mean rounds over ranks.)"""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}
        """[sum, count] by metric."""

    def add(self, sums: Sums, count: int) -> None:
        for name, value in sums.items():
            total, over = value if isinstance(value, tuple) else (value, count)
            entry = self.sums.setdefault(name, [0.0, 0])
            entry[0] += total.item()
            entry[1] += over

    def totals(self) -> Tensor:
        """[metrics, 2] float64."""
        return torch.tensor(list(self.sums.values()), dtype=torch.float64)

    def clear(self) -> None:
        self.sums.clear()
