"""Figures of a reward model, with numbers derived by hand."""

import math

import pytest
import torch

from nemo_style_rlhf.supervised.pair_evaluation import evaluation, pair_statistics


def test_figures_by_hand():
    # margins 2, 1, -1, 0; confidences sigmoid(2) = .881, sigmoid(1) = .731 twice, .5
    chosen, rejected = torch.tensor([3.0, 1.0, 0.0, 5.0]), torch.tensor([1.0, 0.0, 1.0, 5.0])
    found = pair_statistics(chosen, rejected)
    assert found.pairs == 4 and found.accuracy == 0.5 and found.margin == 0.5
    losses = [math.log1p(math.exp(-margin)) for margin in (2, 1, -1, 0)]
    assert found.loss == pytest.approx(sum(losses) / 4)
    # bins of the confidence: .881 right once, .731 right once of two, .5 wrong
    high, middle = 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(-1))
    assert found.calibration_error == pytest.approx((abs(high - 1) + abs(2 * middle - 1) + 0.5) / 4)


def test_a_calibrated_model_has_no_error():
    margins = torch.tensor([math.log(3.0)] * 4)  # confidence .75
    chosen = torch.where(torch.tensor([True, True, True, False]), margins, -margins)
    assert pair_statistics(chosen, torch.zeros(4)).calibration_error == pytest.approx(0, abs=1e-6)


def test_subsets_are_split_and_rows_without_one_count_in_all_only():
    found = evaluation(torch.tensor([1.0, 2.0, -1.0]), torch.zeros(3), ["b", "", "b"])
    assert found["all"]["pairs"] == 3
    assert list(found["subsets"]) == ["b"] and found["subsets"]["b"]["accuracy"] == 0.5
