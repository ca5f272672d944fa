"""Turns sequence scores and per-token KL into per-token rewards."""

import torch
from torch import Tensor

from nemo_style_rlhf.algorithms.masking import zero_masked


def place_rewards(scores: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> Tensor:
    """-kl_coef * kl at every response token, plus the score at the last one (arXiv 1909.08593, eq. 2).

    Args:
        scores: [batch].
        kl: [batch, time], see :func:`kl.kl_estimate`.
        mask: [batch, time]; a sequence without response tokens gets no reward.
    """
    rewards = -kl_coef * zero_masked(kl, mask)
    last = mask.shape[1] - 1 - mask.bool().flip(-1).to(torch.uint8).argmax(-1, keepdim=True)
    return rewards.scatter_add(1, last, torch.where(mask.bool().any(-1), scores.to(rewards.dtype), 0)[:, None])


def truncation_penalty(scores: Tensor, truncated: Tensor, *, coef: float) -> Tensor:
    """Add ``coef`` to scores [batch] where ``truncated`` [batch] bool is set, as TRL's ``missing_eos_penalty`` does."""
    return scores + coef * truncated.to(scores.dtype)


def clip_scores(scores: Tensor, *, low: float | None, high: float | None) -> Tensor:
    """Clamp scores [batch] to low..high; None leaves a side open."""
    return scores if low is None and high is None else scores.clamp(low, high)


def overlong_penalty(lengths: Tensor, *, max_length: Tensor | int, buffer: Tensor | int, factor: float) -> Tensor:
    """0 up to max_length - buffer tokens, then falling linearly to -factor at max_length (DAPO, arXiv 2503.14476, eq. 13).

    Args:
        lengths: [batch] response tokens.
        max_length, buffer: tokens, one number for all or [batch].

    Returns:
        [batch] float32, to add to the scores.
    """
    excess = lengths.float() - (max_length - buffer)
    return -factor * (excess / buffer).clamp(0, 1)


class RunningNormalizer:
    """Normalizes scores by the mean and variance of every score seen so far (Welford, merged batch by batch)."""

    def __init__(self, eps: float = 1e-8) -> None:
        self.eps = eps
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0
        """Sum of squared deviations from the mean."""

    @property
    def variance(self) -> float:
        """Unbiased; 1 before the second score."""
        return self._squares / (self.count - 1) if self.count > 1 else 1.0

    def update(self, scores: Tensor) -> None:
        """Add the scores [batch] to the statistics."""
        batch = scores.double()
        if len(batch) == 0:
            return
        mean, total = float(batch.mean()), self.count + len(batch)
        delta = mean - self.mean
        self._squares += float((batch - mean).square().sum()) + delta**2 * self.count * len(batch) / total
        self.mean += delta * len(batch) / total
        self.count = total

    def normalize(self, scores: Tensor) -> Tensor:
        """(scores - mean) / sqrt(variance + eps), [batch], computed in float64."""
        return ((scores.double() - self.mean) / (self.variance + self.eps) ** 0.5).to(scores.dtype)

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self._squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.count, self.mean, self._squares = int(state["count"]), state["mean"], state["squares"]
