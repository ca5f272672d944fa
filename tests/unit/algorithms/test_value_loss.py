"""The critic's loss against a loop and numbers derived by hand."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_style_rlhf.algorithms.value_loss import value_loss

from . import reference
from .reference import assert_close, many, masks, noise, seeds, selected


def test_a_value_within_the_clip_range_is_not_clipped():
    # old + (V - old) is not V in binary: of these values, some would seem clipped by one rounding
    values, old, returns = torch.randn(3, 1, 1000, generator=torch.Generator().manual_seed(0))
    result = value_loss(values, old, returns, torch.ones(1, 1000), clip=10.0)
    assert float(result.clip_fraction) == 0


@many
@given(mask=masks(), seed=seeds, clip=st.none() | st.floats(0.01, 2))
def test_value_loss_and_its_gradient_match_a_loop(mask, seed, clip):
    values, old, returns = (noise(mask, seed + k) for k in range(3))
    values.requires_grad_()
    result = value_loss(values, old, returns, mask, clip=clip)
    losses, cuts, slopes = [], [], []
    for v, o, r in zip(selected(values, mask), selected(old, mask), selected(returns, mask)):
        squared = (v - r) ** 2
        bounded = squared if clip is None else (min(max(v, o - clip), o + clip) - r) ** 2
        losses.append(0.5 * max(squared, bounded))
        cuts.append(float(bounded > squared))
        slopes.append((v - r) * (bounded <= squared) / len(selected(mask, mask)))
    assert_close(result.loss, reference.mean(losses))
    assert_close(selected(torch.autograd.grad(result.loss, values)[0], mask), slopes)
    assert_close(result.clip_fraction, reference.mean(cuts))
    returns_list = selected(returns, mask)
    residual = [r - v for r, v in zip(returns_list, selected(values, mask))]
    total = reference.mean([(r - reference.mean(returns_list)) ** 2 for r in returns_list])
    if total > 0:
        spread = reference.mean([(x - reference.mean(residual)) ** 2 for x in residual])
        assert_close(result.explained_variance, 1 - spread / total)


def test_value_loss_by_hand():
    # V 3, V_old 1, R 0, clip .5: squared 9, clipped (1.5)^2 = 2.25; the larger counts: 4.5
    one = torch.ones(1, 1)
    result = value_loss(3 * one, one, 0 * one, one, clip=0.5)
    assert_close(result.loss, 4.5)
    assert_close(result.clip_fraction, 0.0)
