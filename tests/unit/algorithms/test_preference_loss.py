"""Losses on preferences: golden numbers, slow references, invariants."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from nemo_style_rlhf.algorithms.preference_loss import (
    DPO_LOSSES,
    REWARD_MODEL_LOSSES,
    dpo_loss,
    kto_loss,
    reward_model_loss,
)

LN3 = math.log(3)  # sigmoid(ln 3) = 3/4
logprobs = st.floats(-300, 0)
betas = st.floats(0.01, 2)
pairs = st.lists(st.tuples(logprobs, logprobs, logprobs, logprobs), min_size=1, max_size=6)
judged = st.lists(st.tuples(logprobs, logprobs, st.booleans()), min_size=1, max_size=6)


def columns(rows):
    return [torch.tensor(column, dtype=torch.float64) for column in zip(*rows)]


def softplus(x):
    """log(1 + exp(x)), that is -log sigmoid(-x)."""
    return max(x, 0) + math.log1p(math.exp(-abs(x)))


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


# --- reward model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", REWARD_MODEL_LOSSES)
def test_golden_numbers(kind):
    """Differences ln 3 and 0: -log sigmoid(ln 3) = -log(3/4), -log sigmoid(0) = ln 2."""
    chosen, rejected = torch.tensor([math.log(3), 1.0]), torch.tensor([0.0, 1.0])
    expected = (math.log(4 / 3) + math.log(2)) / 2
    assert reward_model_loss(chosen, rejected, kind=kind).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", REWARD_MODEL_LOSSES)
def test_a_margin_shifts_the_difference(kind):
    chosen, rejected, margin = torch.randn(5), torch.randn(5), torch.rand(5)
    shifted = reward_model_loss(chosen - margin, rejected, kind=kind)
    torch.testing.assert_close(reward_model_loss(chosen, rejected, margin=margin, kind=kind), shifted)


def test_both_notations_agree_and_stay_finite_far_out():
    chosen, rejected = torch.tensor([-500.0, 500.0, 3.0]), torch.tensor([500.0, -500.0, 2.0])
    losses = [reward_model_loss(chosen, rejected, kind=kind) for kind in REWARD_MODEL_LOSSES]
    torch.testing.assert_close(losses[0], losses[1])
    assert losses[0].isfinite()


def test_half_precision_scores_are_compared_in_fp32():
    scores = torch.randn(4, dtype=torch.bfloat16)
    assert reward_model_loss(scores, scores - 1).dtype == torch.float32


def test_centring_adds_the_squared_sum_of_a_pair():
    """Pairs (3, 1) and (-2, 2): (16 + 0) / 2 = 8, times 0.25."""
    chosen, rejected = torch.tensor([3.0, -2.0]), torch.tensor([1.0, 2.0])
    added = reward_model_loss(chosen, rejected, centring=0.25) - reward_model_loss(chosen, rejected)
    assert added.item() == pytest.approx(2.0, abs=1e-6)


def test_centring_is_computed_in_fp32_too():
    scores = torch.tensor([100.5, 3.0], dtype=torch.bfloat16)
    loss = reward_model_loss(scores, scores - 1, centring=1.0)
    torch.testing.assert_close(loss, reward_model_loss(scores.float(), (scores - 1).float(), centring=1.0))


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="expected one of sigmoid, logexp"):
        reward_model_loss(torch.zeros(1), torch.zeros(1), kind="hinge")


# --- DPO --------------------------------------------------------------------------------------------------------------


def test_dpo_golden_numbers():
    """Differences of the log-ratios: (2 ln 3 - 0) and (-5 - -5), times beta = 1/2: ln 3 and 0; -log sigmoid: ln 4/3 and ln 2."""
    policy_chosen, ref_chosen = torch.tensor([2 * LN3 - 7, -12.0]), torch.tensor([-7.0, -7.0])
    policy_rejected, ref_rejected = torch.tensor([-9.0, -8.0]), torch.tensor([-9.0, -3.0])
    loss = dpo_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta=0.5)
    assert loss.item() == pytest.approx((math.log(4 / 3) + math.log(2)) / 2, abs=1e-6)


def test_conservative_dpo_golden_number():
    """beta times the difference is ln 3: 3/4 ln 4/3 + 1/4 ln 4, since sigmoid(-ln 3) = 1/4."""
    zero = torch.zeros(1)
    loss = dpo_loss(torch.tensor([LN3]), zero, zero, zero, beta=1.0, label_smoothing=0.25)
    assert loss.item() == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4), abs=1e-6)


def test_ipo_golden_number():
    """beta = 1/2 aims at 1: differences 3 and 1 cost 4 and 0."""
    zero = torch.zeros(2)
    loss = dpo_loss(torch.tensor([3.0, 1.0]), zero, zero, zero, beta=0.5, kind="ipo")
    assert loss.item() == pytest.approx(2.0, abs=1e-6)


@given(pairs, betas, st.floats(0, 0.49))
def test_dpo_is_the_loop_written_formula(rows, beta, smoothing):
    total = 0.0
    for policy_chosen, policy_rejected, ref_chosen, ref_rejected in rows:
        h = beta * ((policy_chosen - ref_chosen) - (policy_rejected - ref_rejected))
        total += (1 - smoothing) * softplus(-h) + smoothing * softplus(h)
    loss = dpo_loss(*columns(rows), beta=beta, label_smoothing=smoothing)
    assert loss.item() == pytest.approx(total / len(rows), rel=1e-9, abs=1e-9)


@given(pairs, betas)
def test_ipo_is_the_loop_written_formula(rows, beta):
    total = 0.0
    for policy_chosen, policy_rejected, ref_chosen, ref_rejected in rows:
        total += ((policy_chosen - ref_chosen) - (policy_rejected - ref_rejected) - 1 / (2 * beta)) ** 2
    loss = dpo_loss(*columns(rows), beta=beta, kind="ipo")
    assert loss.item() == pytest.approx(total / len(rows), rel=1e-9, abs=1e-9)


def test_dpo_gradient_is_the_probability_of_the_wrong_order():
    """d loss / d policy_chosen = -beta sigmoid(-beta h) (arXiv 2305.18290, section 4): at h = ln 3, beta = 1 it is -1/4."""
    policy_chosen, zero = torch.tensor([LN3], requires_grad=True), torch.zeros(1)
    dpo_loss(policy_chosen, zero, zero, zero, beta=1.0).backward()
    assert policy_chosen.grad.item() == pytest.approx(-0.25, abs=1e-6)


@pytest.mark.parametrize("kind", DPO_LOSSES)
def test_dpo_compares_half_precision_in_fp32_and_stays_finite(kind):
    far = torch.tensor([-5000.0, -1.0], dtype=torch.bfloat16)
    loss = dpo_loss(far, far.flip(0), far * 0, far * 0, beta=1.0, kind=kind)
    assert loss.dtype == torch.float32 and loss.isfinite()


def test_dpo_refuses_what_it_does_not_know():
    zero = torch.zeros(1)
    with pytest.raises(ValueError, match="'hinge' is unknown: expected one of sigmoid, ipo"):
        dpo_loss(zero, zero, zero, zero, beta=0.1, kind="hinge")
    with pytest.raises(ValueError, match="no meaning for ipo"):
        dpo_loss(zero, zero, zero, zero, beta=0.1, kind="ipo", label_smoothing=0.1)


# --- KTO --------------------------------------------------------------------------------------------------------------


def test_kto_golden_numbers():
    """Log-ratios 1 + ln 3 against a KL of 1: a desirable response costs 1 - 3/4, an undesirable one 1 - 1/4, times 2 and 4."""
    policy, reference = torch.tensor([LN3 - 1, LN3 - 4]), torch.tensor([-2.0, -5.0])
    loss = kto_loss(
        policy, reference, 1.0, torch.tensor([True, False]), beta=1.0, desirable_weight=2.0, undesirable_weight=4.0
    )
    assert loss.item() == pytest.approx((2 * 0.25 + 4 * 0.75) / 2, abs=1e-6)


@given(judged, st.floats(-20, 20), betas, st.floats(0, 3), st.floats(0, 3))
def test_kto_is_the_loop_written_formula(rows, kl, beta, desirable_weight, undesirable_weight):
    total = 0.0
    for policy, reference, desirable in rows:
        gain = beta * (policy - reference - max(kl, 0.0))
        total += desirable_weight * (1 - sigmoid(gain)) if desirable else undesirable_weight * (1 - sigmoid(-gain))
    policy, reference, labels = columns(rows)
    loss = kto_loss(
        policy, reference, torch.tensor(kl), labels.bool(),
        beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight,
    )  # fmt: skip
    assert loss.item() == pytest.approx(total / len(rows), abs=1e-5)  # the KL is a float32


def test_no_gradient_flows_through_the_kl():
    kl, policy = torch.tensor(0.5, requires_grad=True), torch.zeros(2, requires_grad=True)
    kto_loss(policy, torch.zeros(2), kl, torch.tensor([1, 0]), beta=0.1).backward()
    assert kl.grad is None and policy.grad[0] < 0 < policy.grad[1]
