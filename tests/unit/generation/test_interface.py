"""The probe that comes with new weights."""

import math

import pytest
import torch

from nemo_style_rlhf.generation.interface import ProbeTarget, TransferError


@pytest.mark.parametrize("wrong", [-1.5, math.nan, -math.inf])
def test_a_probe_that_differs_or_is_no_number_is_refused(wrong: float) -> None:
    probe = ProbeTarget(((1, 2, 3), (4, 5)), (torch.tensor([-1.0, -2.0]), torch.tensor([-0.5])), max_gap=0.25)
    close = [torch.tensor([-1.0, -2.125]), torch.tensor([-0.5])]
    assert probe.check(lambda sequences: close) == 0.125
    with pytest.raises(TransferError, match="does not hold the trainer's weights"):
        probe.check(lambda sequences: [close[0], torch.tensor([wrong])])
