"""Several sources as one, and what happens when one fails."""

import functools
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import torch

from nemo_style_rlhf.scoring.futures import caught, gathered, mapped
from nemo_style_rlhf.scoring.interface import RewardError, Scorer, Scores, ScoringSample

LOGGER = logging.getLogger(__name__)


class CombinedScorer:
    """The weighted sum of its sources' rewards; values come from the one that has them."""

    def __init__(self, sources: Mapping[str, tuple[Scorer, float]], *, on_error: str) -> None:
        """
        Args:
            sources: name to (source, weight); with weight 0 only its values count.
            on_error: ``stop`` raises what a source raised; ``mask`` marks the samples as failed and logs why.
        """
        self._sources = dict(sources)
        self._on_error = on_error

    def score(self, samples: Sequence[ScoringSample]) -> "Future[Scores]":
        parts = [self._guarded(source, samples) for source, _ in self._sources.values()]
        return gathered(parts, self._sum)

    def close(self) -> None:
        for source, _ in self._sources.values():
            source.close()

    def _guarded(self, source: Scorer, samples: Sequence[ScoringSample]) -> "Future[Scores]":
        """A group a source failed on, as configured; errors that are not the source's stay errors."""
        return mapped(caught(source.score(samples), RewardError), functools.partial(self._checked, len(samples)))

    def _checked(self, count: int, outcome: "Scores | RewardError") -> Scores:
        scores = failure(count, outcome) if isinstance(outcome, RewardError) else outcome
        if scores.reasons:
            reason = scores.reasons[0]
            if self._on_error == "stop":
                raise RewardError(f"{reason}, or set reward.on_error=mask to train without such samples") from reason
            LOGGER.warning("%d of %d samples have no reward: %s", scores.failures.sum(), count, reason)
        return scores

    def _sum(self, parts: list[Scores]) -> Scores:
        failed = torch.stack([part.failures for part in parts]).any(0)
        weights = [weight for _, weight in self._sources.values()]
        rewards = sum(weight * part.rewards for weight, part in zip(weights, parts, strict=True) if weight != 0)
        filter_scores = [part.filter_scores for part in parts if part.filter_scores is not None]
        values = [part.values for part in parts if part.values is not None]
        extra = {
            f"{name}/{key}": value
            for name, part in zip(self._sources, parts, strict=True)
            for key, value in part.extra.items()
        }
        if sum(weight != 0 for weight in weights) > 1:
            extra |= {f"{name}/reward": p.rewards for (name, (_, w)), p in zip(self._sources.items(), parts) if w}
        assert isinstance(rewards, torch.Tensor)
        return Scores(
            rewards=rewards.masked_fill(failed, torch.nan),
            filter_scores=sum(filter_scores[1:], filter_scores[0]).masked_fill(failed, torch.nan)
            if filter_scores
            else None,
            values=values[0] if values else None,
            extra=extra,
            failed=failed,
        )


def failure(count: int, reason: RewardError) -> Scores:
    """Of ``count`` samples that have no score."""
    return Scores(
        rewards=torch.full((count,), torch.nan),
        failed=torch.ones(count, dtype=torch.bool),
        reasons=[reason],
    )


def stacked(parts: "list[Scores | RewardError]") -> Scores:
    """One group out of single samples, some of which may have failed."""
    scores = [failure(1, part) if isinstance(part, RewardError) else part for part in parts]
    names = {name for part in scores for name in part.extra}
    nan = torch.full((1,), torch.nan)
    with_filter = any(part.filter_scores is not None for part in scores)
    return Scores(
        rewards=torch.cat([part.rewards for part in scores]),
        filter_scores=torch.cat([p.rewards if p.filter_scores is None else p.filter_scores for p in scores])
        if with_filter
        else None,
        extra={name: torch.cat([part.extra.get(name, nan) for part in scores]) for name in sorted(names)},
        failed=torch.cat([part.failures for part in scores]),
        reasons=[reason for part in scores for reason in part.reasons],
    )
