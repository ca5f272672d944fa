"""KL estimators, their gradients and the controllers of the KL coefficient, with numbers derived by hand."""

import math

import pytest
import torch

from nemo_style_rlhf.algorithms.kl import AdaptiveKLController, FixedKLController, kl_estimate, kl_loss
from nemo_style_rlhf.algorithms.policy_loss import policy_loss

from .reference import assert_close


@pytest.mark.parametrize(
    ("kind", "expected"),
    # x = .5: k1 = .5; k2 = .125; k3 = exp(-.5) - 1 + .5 = .10653; abs = .5
    [("k1", 0.5), ("k2", 0.125), ("k3", 0.1065306597126334), ("abs", 0.5)],
)
def test_kl_estimators_by_hand(kind, expected):
    assert_close(
        kl_estimate(torch.tensor(-1.0, dtype=torch.float64), torch.tensor(-1.5, dtype=torch.float64), kind=kind),
        expected,
    )


def test_a_small_k3_is_not_lost_in_rounding():
    # exp(-x) - 1 + x = x^2 / 2 - x^3 / 6 + ... = 5e-9 - 1.7e-13 at x = 1e-4; exp(-x) alone is rounded by 6e-8
    x = torch.tensor([1e-4, -1e-4])
    assert kl_estimate(x, torch.zeros(2), kind="k3").tolist() == pytest.approx([5e-9, 5e-9], rel=1e-2, abs=0)
    loss = policy_loss(x[None], torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2), clip_low=0.2, clip_high=0.2)
    assert float(loss.approx_kl) == pytest.approx(5e-9, rel=1e-2, abs=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_pulls_towards_the_reference_however_far_away(dtype):
    # Beyond x = -20 it goes on with the slope it has there, 1 - exp(20) = -485165194.41, from its value there,
    # exp(20) - 21 = 485165174.41. At x = -25: 485165174.41 + 5 * 485165194.41 = 2910991146.46
    x = torch.tensor([-1000.0, -25.0, -20.0, -19.0, 0.0, 30.0], dtype=dtype, requires_grad=True)
    value = kl_estimate(x, torch.zeros_like(x), kind="k3")
    (gradient,) = torch.autograd.grad(value.sum(), x)
    slope = -485165194.40979
    at_1000 = 485165174.40979 + 980 * 485165194.40979
    # at -19: exp(19) - 1 - 19 and 1 - exp(19); at 30: exp(-30) + 29 and 1 - exp(-30)
    values = [at_1000, 2910991146.45874, 485165174.40979, 178482280.963187, 0, 29]
    torch.testing.assert_close(value, torch.tensor(values, dtype=dtype), rtol=1e-6, atol=1e-6)
    gradients = [slope, slope, slope, -178482299.963187, 0, 1]
    torch.testing.assert_close(gradient, torch.tensor(gradients, dtype=dtype), rtol=1e-6, atol=1e-6)


def test_k1_and_k3_are_unbiased():
    # p = (.5, .3, .2), q = (.2, .5, .3): the expectation under p is the KL divergence itself.
    p, q = (torch.tensor(x, dtype=torch.float64) for x in ([0.5, 0.3, 0.2], [0.2, 0.5, 0.3]))
    divergence = float((p * (p / q).log()).sum())
    for kind in ("k1", "k3"):
        assert_close((p * kl_estimate(p.log(), q.log(), kind=kind)).sum(), divergence)


@pytest.mark.parametrize("kind", ["k1", "k3"])
@pytest.mark.parametrize("old", [[0.4, 0.4, 0.2], None])
def test_the_unbiased_gradient_is_that_of_the_divergence(kind, old):
    # The expectation under the sampling policy of what is differentiated, against autograd of sum p log(p / q).
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    logprobs = logits.log_softmax(-1)
    (expected,) = torch.autograd.grad((logprobs.exp() * (logprobs - q.log())).sum(), logits, retain_graph=True)
    sampled = logprobs.exp().detach() if old is None else torch.tensor(old, dtype=torch.float64)
    loss = kl_loss(logprobs, q.log(), kind=kind, unbiased=True, old_logprobs=None if old is None else sampled.log())
    (actual,) = torch.autograd.grad((sampled * loss).sum(), logits)
    assert_close(actual, expected)
    assert_close(loss, kl_estimate(logprobs, q.log(), kind=kind))


def test_kl_controllers_by_hand():
    fixed = FixedKLController(0.1)
    fixed.update(100.0, 64)
    assert fixed.coef == 0.1
    adaptive = AdaptiveKLController(0.1, target=6.0, horizon=1000)
    adaptive.update(6.6, 100)  # error .1: 0.1 * (1 + .1 * .1)
    assert_close(adaptive.coef, 0.101)
    adaptive.update(1000.0, 100)  # the error is clipped at .2
    assert_close(adaptive.coef, 0.101 * 1.02)
    adaptive.update(0.0, 100)
    assert_close(adaptive.coef, 0.101 * 1.02 * 0.98)


def test_one_large_rollout_cannot_take_the_kl_coefficient_to_0_or_below():
    # 512 samples, horizon 64: the multiplier 1 - .2 * 8 = -.6 is bounded by its least; upwards 1 + .2 * 8 = 2.6 as published
    adaptive = AdaptiveKLController(0.1, target=6.0, horizon=64, min_multiplier=0.25)
    adaptive.update(0.0, 512)
    assert_close(adaptive.coef, 0.025)
    adaptive.update(math.inf, 512)
    assert_close(adaptive.coef, 0.065)


def test_a_kl_that_is_no_number_does_not_steer():
    adaptive = AdaptiveKLController(0.1, target=6.0, horizon=1000)
    adaptive.update(math.nan, 100)
    assert adaptive.coef == 0.1
