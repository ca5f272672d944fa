"""Bradley-Terry loss: golden numbers and invariants."""

import math

import pytest
import torch

from nemo_style_rlhf.algorithms.preference_loss import REWARD_MODEL_LOSSES, reward_model_loss


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


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="expected one of sigmoid, logexp"):
        reward_model_loss(torch.zeros(1), torch.zeros(1), kind="hinge")
