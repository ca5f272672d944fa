"""Per-token estimators of KL(policy || reference) from sampled tokens, after Schulman, "Approximating KL Divergence"."""

from torch import Tensor

KL_KINDS = ("k1", "k2", "k3", "abs")


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, *, kind: str) -> Tensor:
    """With x = logprobs - ref_logprobs, of any one shape:

    ``k1`` is x (unbiased), ``k2`` x^2 / 2, ``k3`` exp(-x) - 1 + x (unbiased, never negative), ``abs`` |x|
    (NeMo-Aligner's default).
    """
    x = logprobs - ref_logprobs
    if kind == "k1":
        return x
    if kind == "k2":
        return 0.5 * x.square()
    if kind == "k3":
        return (-x).exp() - 1 + x
    if kind == "abs":
        return x.abs()
    raise ValueError(f"KL estimator {kind!r} is unknown: expected one of {', '.join(KL_KINDS)}")
