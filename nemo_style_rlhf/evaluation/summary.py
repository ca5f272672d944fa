"""Summarizes the samples of each checkpoint."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from nemo_style_rlhf.evaluation.samples import Sample


@dataclass(frozen=True)
class CheckpointSummary:
    name: str
    path: str
    mean_score: float | None
    """Mean over prompts of the mean score of a prompt's responses."""
    standard_error: float | None
    """Standard error of mean_score, over prompts: responses to one prompt are not independent. None with fewer than two
    scored prompts."""
    win_rate: float | None
    """Share of responses that score higher than the first checkpoint's to the same prompt with the same seed; a tie counts
    half. None for the first checkpoint itself."""
    mean_length: float
    """Mean length in tokens."""
    truncated_fraction: float
    distinct_responses: int
    """Number of distinct texts among the responses."""
    samples: int
    unscored: int
    """Number of responses on which the reward sources failed."""


def summarize(name: str, path: str, samples: Sequence[Sample], first: Sequence[Sample] | None) -> CheckpointSummary:
    """Summarize the ``samples`` of a checkpoint, at least one; ``first`` are the first checkpoint's, None if this is it."""
    prompt_means = _prompt_means(samples)
    scored = any(sample.score is not None for sample in samples)
    return CheckpointSummary(
        name=name,
        path=path,
        mean_score=fmean(prompt_means) if prompt_means else None,
        standard_error=stdev(prompt_means) / math.sqrt(len(prompt_means)) if len(prompt_means) > 1 else None,
        win_rate=None if first is None else win_rate(samples, first),
        mean_length=fmean(sample.length for sample in samples),
        truncated_fraction=fmean(sample.truncated for sample in samples),
        distinct_responses=len({sample.response for sample in samples}),
        samples=len(samples),
        unscored=sum(sample.score is None for sample in samples) if scored else 0,
    )


def win_rate(samples: Sequence[Sample], opponents: Sequence[Sample]) -> float | None:
    """Win rate over responses to the same prompt with the same number, hence seed; None if no pair has two scores."""
    theirs = {(sample.prompt_id, sample.index): sample.score for sample in opponents}
    outcomes = []
    for sample in samples:
        other = theirs.get((sample.prompt_id, sample.index))
        if sample.score is not None and other is not None:
            outcomes.append(1.0 if sample.score > other else 0.5 if sample.score == other else 0.0)
    return fmean(outcomes) if outcomes else None


def _prompt_means(samples: Sequence[Sample]) -> list[float]:
    scores: dict[int, list[float]] = {}
    for sample in samples:
        if sample.score is not None:
            scores.setdefault(sample.prompt_id, []).append(sample.score)
    return [fmean(of_prompt) for of_prompt in scores.values()]
