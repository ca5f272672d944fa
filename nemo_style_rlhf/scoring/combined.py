"""Combines several reward sources into one, and handles their failures."""

import functools
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

import torch

from nemo_style_rlhf.scoring.futures import caught, gathered, mapped, resolved
from nemo_style_rlhf.scoring.interface import RewardError, Scorer, Scores, ScoringSample

LOGGER = logging.getLogger(__name__)


class CombinedScorer:
    """The weighted sum of its sources' rewards; values come from the source that has them."""

    def __init__(self, sources: Mapping[str, tuple[Scorer, float]], *, on_error: str) -> None:
        """Combine ``sources``; without any, rewards are 0.

        Args:
            sources: name to (source, weight); with weight 0 only the source's values count.
            on_error: ``stop`` raises a source's error; ``mask`` marks the samples as failed and logs the reason.
        """
        self._sources = dict(sources)
        self._on_error = on_error

    def score(self, samples: Sequence[ScoringSample]) -> "Future[Scores]":
        if not self._sources:
            return resolved(Scores(torch.zeros(len(samples))))
        parts = [self._guarded(name, samples) for name in self._sources]
        return gathered(parts, self._sum)

    def close(self) -> None:
        for source, _ in self._sources.values():
            source.close()

    def _guarded(self, name: str, samples: Sequence[ScoringSample]) -> "Future[Scores]":
        """Score with one source. Its failures are handled as configured; other errors stay errors."""
        source, _ = self._sources[name]
        return mapped(caught(source.score(samples), RewardError), functools.partial(self._checked, name, len(samples)))

    def _checked(self, name: str, count: int, outcome: "Scores | RewardError") -> Scores:
        scores = failure(count, outcome) if isinstance(outcome, RewardError) else outcome
        if self._sources[name][1] != 0:
            scores = finite(scores, f"the reward of reward.{name}", "check its reward model")
        return self._handled(scores)

    def _handled(self, scores: Scores) -> Scores:
        """Log a failure; raises RewardError instead if ``on_error`` is stop."""
        if scores.reasons:
            reason = scores.reasons[0]
            if self._on_error == "stop":
                raise RewardError(f"{reason}, or set reward.on_error=mask to train without such samples") from reason
            LOGGER.warning("%d of %d samples have no reward: %s", scores.failures.sum(), len(scores.failures), reason)
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
        scores = Scores(
            rewards=rewards.masked_fill(failed, torch.nan),
            filter_scores=sum(filter_scores[1:], filter_scores[0]).masked_fill(failed, torch.nan)
            if filter_scores
            else None,
            values=values[0] if values else None,
            critic_steps=frozenset().union(*(part.critic_steps for part in parts)),
            extra=extra,
            failed=failed,
        )
        names = ", ".join(name for name, weight in zip(self._sources, weights, strict=True) if weight != 0)
        return self._handled(finite(scores, f"the weighted sum of {names}", "lower reward.*.weight"))


def finite(scores: Scores, what: str, advice: str) -> Scores:
    """Mark samples whose reward is NaN or infinite as failed, too; ``what`` and ``advice`` go into the reason."""
    wrong = ~(scores.rewards.isfinite() | scores.failures)
    if not wrong.any():
        return scores
    reason = RewardError(
        f"{what} is {float(scores.rewards[wrong][0])} for {int(wrong.sum())} of {len(wrong)} samples, expected finite "
        f"numbers: {advice}"
    )
    return replace(
        scores,
        rewards=scores.rewards.masked_fill(wrong, torch.nan),
        filter_scores=None if scores.filter_scores is None else scores.filter_scores.masked_fill(wrong, torch.nan),
        failed=scores.failures | wrong,
        reasons=[*scores.reasons, reason],
    )


def failure(count: int, reason: RewardError) -> Scores:
    """Scores of ``count`` failed samples."""
    return Scores(
        rewards=torch.full((count,), torch.nan),
        failed=torch.ones(count, dtype=torch.bool),
        reasons=[reason],
    )


def stacked(parts: "Sequence[Scores | RewardError]") -> Scores:
    """Join single samples, some of which may have failed, into one group."""
    return Scores.joined([failure(1, part) if isinstance(part, RewardError) else part for part in parts])
