"""Per-token estimators of KL(policy || reference) from sampled tokens, after Schulman, "Approximating KL Divergence"."""

import math

import torch
from torch import Tensor

from nemo_style_rlhf.algorithms.names import KL_KINDS

MAX_LOG_RATIO = 20.0  # bounds k3's exponent, so that one token cannot make it infinite
MAX_WEIGHT = 10.0


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, *, kind: str) -> Tensor:
    """Estimate KL per token with x = logprobs - ref_logprobs, both of the same shape:

    ``k1`` is x (unbiased), ``k2`` x^2 / 2, ``k3`` exp(-x) - 1 + x (unbiased, never negative), ``abs`` ``|x|``
    (NeMo-Aligner's default). Below x = -20 k3 continues as its tangent there: finite, convex, and still pulling towards the
    reference.

    Raises:
        ValueError: unknown kind.
    """
    x = logprobs - ref_logprobs
    if kind == "k1":
        return x
    if kind == "k2":
        return 0.5 * x.square()
    if kind == "k3":
        guarded = x.clamp(min=-MAX_LOG_RATIO)
        k3 = (-guarded).expm1() + guarded
        return torch.where(x < -MAX_LOG_RATIO, k3 + (1 - math.exp(MAX_LOG_RATIO)) * (x + MAX_LOG_RATIO), k3)
    if kind == "abs":
        return x.abs()
    raise ValueError(f"KL estimator {kind!r} is unknown: expected one of {', '.join(KL_KINDS)}")


def kl_loss(
    logprobs: Tensor, ref_logprobs: Tensor, *, kind: str, unbiased: bool, old_logprobs: Tensor | None = None
) -> Tensor:
    """The estimate as a term of the loss, in the shape of the inputs. Pass unmasked tokens only: a NaN would reach the gradient.

    Differentiating an estimator is not estimating the derivative: k1's gradient is zero in expectation, k3's is the gradient
    of KL(reference || policy). With ``unbiased`` the value is ``kind``'s and the gradient k2's, x * grad(logprobs). Its
    expectation under the policy is the gradient of KL(policy || reference) (verl's ``k3+``; Tang and Munos, arXiv 2506.09477).

    Args:
        old_logprobs: log-probabilities under the policy that sampled the tokens. With them, the unbiased gradient is weighted
            by policy / old policy, at most ``MAX_WEIGHT``, so that it stays unbiased after the first optimizer step
            (DeepSeek-V3.2, arXiv 2512.02556).
    """
    value = kl_estimate(logprobs, ref_logprobs, kind=kind)
    if not unbiased:
        return value
    surrogate = kl_estimate(logprobs, ref_logprobs, kind="k2")
    if old_logprobs is not None:
        surrogate = surrogate * (logprobs.detach() - old_logprobs).clamp(max=math.log(MAX_WEIGHT)).exp()
    return surrogate - surrogate.detach() + value.detach()


class FixedKLController:
    """A constant KL coefficient."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, kl: float, num_samples: int) -> None:
        """Does nothing."""


class AdaptiveKLController:
    """A KL coefficient that steers towards ``target`` (arXiv 1909.08593, section 2.2)."""

    def __init__(self, coef: float, target: float, horizon: float, min_multiplier: float = 0.5) -> None:
        """Start with the coefficient ``coef``.

        Args:
            target: desired KL, in the unit passed to :meth:`update`.
            horizon: samples over which a constant error of 20 % or more changes the coefficient by about 20 %.
            min_multiplier: smallest factor of one update, above 0: the published one turns negative once a rollout has more than
                5 x horizon samples.
        """
        self.coef = coef
        self.target = target
        self.horizon = horizon
        self.min_multiplier = min_multiplier

    def update(self, kl: float, num_samples: int) -> None:
        """coef <- coef * max(1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon, min_multiplier); NaN is ignored."""
        if math.isnan(kl):
            return
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= max(1 + error * num_samples / self.horizon, self.min_multiplier)
