"""Importance weights against a loop."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_style_rlhf.algorithms.corrections import importance_weights
from nemo_style_rlhf.algorithms.names import CORRECTIONS

from .reference import assert_close, many, masks, noise, seeds, selected


@many
@given(
    mask=masks(), seed=seeds, kind=st.sampled_from(CORRECTIONS), low=st.floats(0, 1), high=st.floats(1, 4),
)  # fmt: skip
def test_importance_weights_match_a_loop(mask, seed, kind, low, high):
    trainer, sampler = noise(mask, seed), noise(mask, seed + 1)
    weights = importance_weights(trainer, sampler, mask, kind=kind, low=low, high=high)
    for row in range(len(mask)):
        logs = selected(trainer[row : row + 1] - sampler[row : row + 1], mask[row : row + 1])
        each = [math.exp(x) for x in logs]
        if kind == "tis":
            expected = [min(max(w, low), high) for w in each]
        elif kind == "icepop":
            expected = [w if low <= w <= high else 0.0 for w in each]
        else:
            inside = bool(logs) and low <= math.exp(sum(logs) / len(logs)) <= high
            expected = each if inside else [0.0] * len(each)
        assert_close(selected(weights[row : row + 1], mask[row : row + 1]), expected)
    assert (weights[mask == 0] == 0).all()


def test_other_corrections_are_refused():
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="'clip' is unknown: expected one of tis"):
        importance_weights(one, one, one, kind="clip", low=0, high=2)
