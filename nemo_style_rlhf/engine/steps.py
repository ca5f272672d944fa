"""The loop of optimizer steps, shared by actor and critic."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from nemo_style_rlhf.engine.engine import Engine

MicroBatch = TypeVar("MicroBatch")


@dataclass
class OptimizerStep:
    losses: list[float]
    """Loss of each micro-batch that this rank computed, as part of the step's loss."""
    grad_norm: float
    """Global L2 norm before clipping; 0 if the step was skipped."""
    lr: float


def optimizer_steps(
    engine: Engine,
    plan: Iterable[Iterable[tuple[MicroBatch, bool]]],
    loss: Callable[[int, MicroBatch, bool], Tensor],
    *,
    seed: int,
    skipped: Callable[[int], bool] = lambda number: False,
) -> list[OptimizerStep]:
    """Take an optimizer step for each entry of ``plan``.

    Args:
        plan: this rank's micro-batches of each step, each with a flag that says whether it counts. Every rank has as many, see
            :meth:`Ranks.shard`.
        loss: computes the loss of a micro-batch of step ``number``, a part of the whole step's loss. If its last argument is
            False, the loss must be 0, but from the same forward.
        seed: dropout seed, so that a restored model needs no saved state of a random generator. Each rank gives its own.
        skipped: True if step ``number`` leaves optimizer, schedule and weights as they are; its losses are still computed.

    Raises:
        NonFiniteError: a loss or gradient is not finite.
    """
    torch.manual_seed(seed)
    engine.train()
    steps = []
    for number, micro_batches in enumerate(plan):
        losses = []
        learns = not skipped(number)
        with torch.set_grad_enabled(learns):
            for micro_batch, counts in micro_batches:
                part = loss(number, micro_batch, counts)
                if learns:
                    engine.backward(part)
                if counts:
                    losses.append(float(part.detach()))
        lr = engine.lr
        steps.append(OptimizerStep(losses, engine.step() if learns else 0.0, lr))
    engine.eval()
    return steps


@dataclass
class TokenMeans:
    """Token-weighted means of statistics of micro-batches of unequal size."""

    totals: dict[str, float] = field(default_factory=dict)
    tokens: float = 0.0

    def add(self, tokens: float, **means: Tensor) -> None:
        self.tokens += tokens
        for name, mean in means.items():
            self.totals[name] = self.totals.get(name, 0.0) + (
                float(mean) * tokens if tokens else 0.0
            )  # nothing to average

    @staticmethod
    def of(shards: "Collection[TokenMeans]") -> "TokenMeans":
        """The means of all ranks together."""
        names = sorted({name for shard in shards for name in shard.totals})
        return TokenMeans(
            {name: sum(shard.totals.get(name, 0.0) for shard in shards) for name in names},
            sum(shard.tokens for shard in shards),
        )

    def mean(self, name: str) -> float:
        return self.totals[name] / max(self.tokens, 1.0)
