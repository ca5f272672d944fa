"""Results of the episodes of a batch: their rollouts, scores and counts."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from nemo_style_rlhf.rollout.types import Rollout
from nemo_style_rlhf.scoring.futures import mapped, resolved
from nemo_style_rlhf.scoring.interface import Scores


@dataclass
class Counts:
    """Counts and times of the episodes of a batch."""

    retried: int = 0
    """Attempts that failed, followed by another one."""
    failed: int = 0
    """Episodes that failed for good."""
    timed_out: int = 0
    """Attempts that timed out."""
    restarted: int = 0
    """Episodes that began again because another one took their worker with it. It is the only count that the clock decides."""
    seconds: float = 0.0
    """Seconds spent in environments, summed over episodes."""
    reasons: list[str] = field(default_factory=list)
    """Reasons of failed attempts."""

    @staticmethod
    def summed(parts: "Sequence[Counts]") -> "Counts":
        def total(name: str) -> Any:
            values = [getattr(part, name) for part in parts]
            return sum(values[1:], values[0])

        return Counts(**{each.name: total(each.name) for each in fields(Counts)})

    @property
    def of_episodes(self) -> dict[str, float]:
        return {
            "agent/retried_episodes": float(self.retried),
            "agent/failed_episodes": float(self.failed),
            "agent/timeouts": float(self.timed_out),
        }

    @property
    def of_clock(self) -> dict[str, float]:
        return {"clock/restarted_episodes": float(self.restarted), "clock/environment_seconds": self.seconds}


@dataclass
class Outcome:
    """A finished episode."""

    rollouts: list[Rollout]
    reward: float
    """Sum over its turns."""
    score: float | None
    metrics: dict[str, float]
    """Its numbers of turns and branches, and the environment's metrics."""
    failed: bool = False
    of_program: bool = False
    """True if its rollouts are branches, the last one with the program's answer; else they follow one another."""

    @property
    def scored(self) -> list[Rollout]:
        """The rollouts whose text sources score."""
        return self.rollouts[-1:] if self.of_program else self.rollouts


def with_episodes(outcomes: Sequence[Outcome], asked: "Future[Scores] | None") -> "Future[Scores]":
    """The scores of a group of episodes.

    Args:
        asked: scores of the reward sources, for episodes that have not failed; None if all have. They are added to the
            rewards of the environment.
    """
    if asked is None:
        return resolved(_joined(outcomes, None))
    return mapped(asked, lambda scores: _joined(outcomes, scores))


def _joined(outcomes: Sequence[Outcome], asked: Scores | None) -> Scores:
    alive = torch.tensor([not outcome.failed for outcome in outcomes])

    def spread(values: Tensor) -> Tensor:
        """Values of the living episodes [n], and NaN for the others."""
        return torch.full((len(outcomes),), torch.nan).masked_scatter(alive, values)

    rewards = torch.tensor([outcome.reward for outcome in outcomes], dtype=torch.float32)
    names = sorted({name for outcome in outcomes for name in outcome.metrics})
    extra = {name: torch.tensor([outcome.metrics.get(name, torch.nan) for outcome in outcomes]) for name in names}
    failed, filter_scores = ~alive, None
    if asked is not None:
        rewards = rewards + spread(asked.rewards)
        failed = failed | spread(asked.failures.float()).nan_to_num(1).bool()
        extra |= {name: spread(values) for name, values in asked.extra.items()}
        filter_scores = None if asked.filter_scores is None else spread(asked.filter_scores)
    if any(outcome.score is not None for outcome in outcomes):
        own = [
            reward if outcome.score is None else outcome.score for outcome, reward in zip(outcomes, rewards.tolist())
        ]
        filter_scores = torch.tensor(own).masked_fill(failed, torch.nan)
    return Scores(rewards.masked_fill(failed, torch.nan), filter_scores, extra=extra, failed=failed)
