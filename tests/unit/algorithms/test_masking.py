"""Means, whitening and sums under a mask; nothing that stands under its zeros reaches a result or a gradient."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_style_rlhf.algorithms.advantages import discounted_returns, gae
from nemo_style_rlhf.algorithms.corrections import importance_weights
from nemo_style_rlhf.algorithms.masking import aggregate, masked_mean, masked_whiten
from nemo_style_rlhf.algorithms.names import AGGREGATIONS, CORRECTIONS
from nemo_style_rlhf.algorithms.policy_loss import policy_loss
from nemo_style_rlhf.algorithms.reward_shaping import place_rewards
from nemo_style_rlhf.algorithms.value_loss import value_loss

from . import reference
from .reference import assert_close, many, masks, noise, seeds, selected


@many
@given(mask=masks(), seed=seeds)
def test_masked_mean_and_whitening_see_unmasked_elements_only(mask, seed):
    x = noise(mask, seed)
    values = selected(x, mask)
    mean = reference.mean(values)
    assert_close(masked_mean(x, mask), mean)
    variance = sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)
    expected = [(value - mean) / math.sqrt(variance + 1e-8) for value in values]
    assert_close(selected(masked_whiten(x, mask), mask), expected)
    assert (masked_whiten(x, mask)[mask == 0] == 0).all()


@many
@given(mask=masks(), seed=seeds, dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_equal_elements_whiten_to_exactly_0(mask, seed, dtype):
    """The rounding of their mean, times rsqrt(1e-8), is nothing to learn from: 7 times 42.1 would give .038 in fp32."""
    value = 50 * torch.randn((), generator=torch.Generator().manual_seed(seed))
    x = torch.full(mask.shape, float(value), dtype=dtype).masked_fill(mask == 0, math.inf)
    whitened = masked_whiten(x, mask)
    assert whitened.dtype == dtype and not whitened.any()
    assert not value_loss(x.zero_(), x, x + 0.7, mask, clip=None).explained_variance


@many
@given(mask=masks(), seed=seeds)
def test_the_gradient_of_whitening_is_that_of_its_definition(mask, seed):
    x, upstream = noise(mask, seed).requires_grad_(), noise(mask, seed + 1, poison=False)
    (actual,) = torch.autograd.grad((masked_whiten(x, mask) * upstream).sum(), x)
    values = x.detach()[mask.bool()].requires_grad_()
    centered = values - values.mean()
    whitened = centered * (centered.square().sum() / max(len(values) - 1, 1) + 1e-8).rsqrt()
    expected = torch.zeros_like(x)
    (expected[mask.bool()],) = torch.autograd.grad((whitened * upstream[mask.bool()]).sum(), values)
    assert_close(actual, expected)


@many
@given(mask=masks(), seed=seeds, mode=st.sampled_from(AGGREGATIONS))
def test_aggregate_matches_its_definition(mask, seed, mode):
    x = noise(mask, seed)
    rows = [selected(x[row : row + 1], mask[row : row + 1]) for row in range(len(mask))]
    rows = [row for row in rows if row]
    tokens = sum(map(len, rows))
    expected = {
        "token_mean": sum(map(sum, rows)) / tokens,
        "seq_mean_token_mean": sum(map(reference.mean, rows)) / len(rows),
        "seq_mean_token_sum": sum(map(sum, rows)) / len(rows),
        "seq_sum_constant": sum(map(sum, rows)) / mask.numel(),
    }[mode]
    assert_close(aggregate(x, mask, mode=mode), expected)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_with_the_steps_normalizer_micro_batches_add_up_to_the_whole(mode):
    mask = torch.tensor([[1.0, 1, 0], [1, 0, 0], [1, 1, 1], [0, 1, 0]], dtype=torch.float64)
    x = noise(mask, 3)
    normalizer = {"token_mean": mask.sum(), "seq_sum_constant": 12.0}.get(mode, 4.0)
    whole = aggregate(x, mask, mode=mode, normalizer=normalizer)
    parts = sum(aggregate(x[row : row + 1], mask[row : row + 1], mode=mode, normalizer=normalizer) for row in range(4))
    assert_close(parts, whole)


def test_a_mask_in_half_precision_counts_right():
    mask = torch.ones(1, 1001, dtype=torch.bfloat16)  # its sum is 1000 there
    assert float(masked_mean(torch.ones(1, 1001), mask)) == 1
    assert float(aggregate(torch.ones(1, 1001), mask, mode="seq_mean_token_mean")) == 1


def policy_results(*tensors, level, aggregation):
    """Everything that policy_loss returns."""
    logprobs, old, advantages, weights, mask = tensors
    result = policy_loss(
        logprobs, old, advantages, mask, clip_low=0.2, clip_high=0.3, dual_clip=1.5, level=level,
        aggregation=aggregation, weights=weights,
    )  # fmt: skip
    return result.loss, result.ratio, result.clip_fraction, result.approx_kl


MASKED = {
    **{
        f"policy_loss {level} {mode}": (4, partial(policy_results, level=level, aggregation=mode))
        for level in ("token", "sequence")
        for mode in AGGREGATIONS
    },
    **{
        f"importance_weights {kind}": (2, partial(importance_weights, kind=kind, low=0.5, high=2))
        for kind in CORRECTIONS
    },
    **{f"aggregate {mode}": (1, partial(aggregate, mode=mode)) for mode in AGGREGATIONS},
    "value_loss": (3, lambda *tensors: tuple(vars(value_loss(*tensors, clip=0.2)).values())),
    "masked_whiten": (1, masked_whiten),
    "masked_whiten, only centered": (1, partial(masked_whiten, divide=False)),
    "masked_mean": (1, masked_mean),
    "gae": (2, partial(gae, gamma=0.9, lam=0.8)),
    "discounted_returns": (1, partial(discounted_returns, gamma=0.9)),
    "place_rewards": (1, lambda kl, mask: place_rewards(kl.new_ones(len(mask)), kl, mask, kl_coef=0.3)),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKED)
@settings(max_examples=50, deadline=None)
@given(
    mask=masks(), seed=seeds, nothing=st.booleans(),
    dtypes=st.tuples(*[st.sampled_from([torch.float32, torch.float64, torch.bfloat16])] * 2),
)  # fmt: skip
def test_what_stands_under_mask_0_reaches_neither_result_nor_gradient(name, mask, seed, nothing, dtypes):
    """Bit for bit, with NaN and infinities there, in empty rows, in gaps, and where everything is masked."""
    count, function = MASKED[name]
    mask = (mask * (not nothing)).to(dtypes[0])
    clean = [noise(mask, seed + index, poison=False).to(dtypes[1]) for index in range(count)]
    found = []
    for poison in (0.0, math.nan, math.inf, -math.inf):
        inputs = [x.masked_fill(mask == 0, poison).requires_grad_() for x in clean]
        outputs = function(*inputs, mask)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        grads = [torch.zeros_like(x) for x in inputs]
        if outputs[0].requires_grad:
            upstream = noise(outputs[0], seed, poison=False).to(outputs[0].dtype)
            grads = torch.autograd.grad(outputs[0], inputs, upstream, materialize_grads=True)
        assert not any(grad[mask == 0].any() for grad in grads)
        assert all(torch.isfinite(x).all() for x in (*outputs, *grads))
        found.append([*outputs, *grads])
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))
