"""Learning rate over optimizer steps."""

import math

from torch.optim.lr_scheduler import LambdaLR

from nemo_style_rlhf.schema.common import OptimizerConfig, SchedulerConfig


def lr_factor(step: int, config: SchedulerConfig, total_steps: int) -> float:
    """Factor of the base learning rate for optimizer step ``step``, counted from 0.

    Warmup reaches 1 after ``warmup_steps``; the decay ends at ``min_lr_ratio`` after ``total_steps``.
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.name == "constant":
        return 1.0
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    decay = 1 - progress if config.name == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * decay


def follow_config(schedule: LambdaLR, optim: OptimizerConfig) -> None:
    """Replace the optimizer settings restored from a checkpoint with the config's: the user may have changed them."""
    schedule.base_lrs = [optim.lr] * len(schedule.base_lrs)
    for group, factor in zip(schedule.optimizer.param_groups, schedule.lr_lambdas, strict=True):
        group.update(
            initial_lr=optim.lr,
            lr=optim.lr * factor(schedule.last_epoch),
            betas=tuple(optim.betas),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
        )
    schedule._last_lr = [group["lr"] for group in schedule.optimizer.param_groups]
