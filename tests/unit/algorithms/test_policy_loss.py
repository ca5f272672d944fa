"""The policy's loss against loop-written float64 references and numbers derived by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_style_rlhf.algorithms.kl import kl_estimate
from nemo_style_rlhf.algorithms.masking import aggregate
from nemo_style_rlhf.algorithms.names import AGGREGATIONS
from nemo_style_rlhf.algorithms.policy_loss import policy_loss

from . import reference
from .reference import assert_close, many, masks, noise, seeds


def test_unknown_names_are_refused():
    mask = torch.ones(1, 1)
    with pytest.raises(ValueError, match="aggregation 'mean'"):
        aggregate(mask, mask, mode="mean")
    with pytest.raises(ValueError, match="KL estimator 'k9'"):
        kl_estimate(mask, mask, kind="k9")
    with pytest.raises(ValueError, match="level 'word'"):
        policy_loss(mask, mask, mask, mask, clip_low=0.2, clip_high=0.2, level="word")


@many
@given(
    mask=masks(),
    seed=seeds,
    low=st.floats(0.05, 0.9),
    high=st.floats(0.05, 2),
    dual=st.none() | st.floats(1.1, 4),
    level=st.sampled_from(["token", "sequence"]),
    mode=st.sampled_from(AGGREGATIONS),
    scale=st.sampled_from([0.1, 1.0, 20.0]),
    weighted=st.booleans(),
)
def test_policy_loss_and_its_gradient_match_a_loop(mask, seed, low, high, dual, level, mode, scale, weighted):
    logprobs, old, advantages, weights = (noise(mask, seed + k) for k in range(4))
    logprobs, weights = (scale * logprobs).requires_grad_(), weights.abs() if weighted else torch.ones_like(mask)
    result = policy_loss(
        logprobs, old, advantages, mask, clip_low=low, clip_high=high, dual_clip=dual, level=level, aggregation=mode,
        weights=weights if weighted else None,
    )  # fmt: skip
    losses, ratios, clipped, kls = torch.zeros_like(mask, requires_grad=True), [], [], []
    values, slopes = torch.zeros_like(mask), torch.zeros_like(mask)  # slope: d loss of a token / d its log-probability
    for row in range(len(mask)):
        steps = [t for t in range(mask.shape[1]) if mask[row, t]]
        for t in steps:
            log_ratio = float(logprobs[row, t] - old[row, t])
            if level == "sequence":
                log_ratio = reference.mean([float(logprobs[row, k] - old[row, k]) for k in steps])
            ratio, advantage = math.exp(min(max(log_ratio, -20), 20)), float(advantages[row, t])
            free = -ratio * advantage
            bounded = -min(max(ratio, 1 - low), 1 + high) * advantage
            loss = max(free, bounded)
            cut = bounded > free
            if dual is not None and advantage < 0 and loss > -dual * advantage:
                loss, cut = -dual * advantage, True
            values[row, t] = loss * float(weights[row, t])
            if not cut and abs(log_ratio) <= 20:
                slopes[row, t] = free * float(weights[row, t])
            ratios.append(ratio)
            clipped.append(float(cut))
            token = float(logprobs[row, t] - old[row, t])
            kls.append(math.exp(min(max(token, -20), 20)) - 1 - token)
    assert_close(result.loss, aggregate(values, mask, mode=mode))
    (shares,) = torch.autograd.grad(aggregate(losses, mask, mode=mode), losses)
    assert_close(torch.autograd.grad(result.loss, logprobs)[0], shares * slopes)
    assert_close(result.ratio, reference.mean(ratios))
    assert_close(result.clip_fraction, reference.mean(clipped))
    assert_close(result.approx_kl, reference.mean(kls))


def test_approx_kl_is_that_of_tokens_at_either_level():
    # log ratios +.5 and -.5: (e^.5 - 1 - .5 + e^-.5 - 1 + .5) / 2 = (1.6487213 + .6065307 - 2) / 2; the sequence's ratio is 1
    logprobs, zero, mask = torch.tensor([[0.5, -0.5]], dtype=torch.float64), torch.zeros(1, 2), torch.ones(1, 2)
    for level, ratio in [("token", 1.1276259652063807), ("sequence", 1.0)]:
        result = policy_loss(logprobs, zero, mask, mask, clip_low=0.2, clip_high=0.2, level=level)
        assert_close(result.approx_kl, 0.1276259652063807)
        assert_close(result.ratio, ratio)


def sequence_gradient(mode, weights, advantages, *, clip=1.0, level="sequence"):
    """d loss / d log-probabilities of one sequence of 3 tokens with log ratios .3, -.1, .1: s = exp(.1)."""
    logprobs = torch.tensor([[-0.7, -1.1, -0.9]], dtype=torch.float64, requires_grad=True)
    old, mask = torch.full((1, 3), -1.0, dtype=torch.float64), torch.ones(1, 3, dtype=torch.float64)
    weights = None if weights is None else torch.tensor([weights], dtype=torch.float64)
    result = policy_loss(
        logprobs, old, torch.tensor([advantages], dtype=torch.float64), mask, clip_low=clip, clip_high=clip, level=level,
        aggregation=mode, weights=weights,
    )  # fmt: skip
    return torch.autograd.grad(result.loss, logprobs)[0]


def test_at_sequence_level_each_token_has_the_gradient_of_its_own_weight_and_advantage():
    # d loss / d logp_t = -w_t A_t s / 3
    s = math.exp(0.1)
    assert_close(sequence_gradient("token_mean", [2.0, 0.0, 0.5], [1.0, 1.0, 1.0]), [[-2 * s / 3, 0, -s / 6]])
    assert_close(sequence_gradient("token_mean", None, [1.0, 0.0, -1.0]), [[-s / 3, 0, s / 3]])
    # clipped at 1.05 < s: only the negative advantage, which the clipping leaves alone, has a gradient
    assert_close(sequence_gradient("token_mean", None, [1.0, 0.0, -1.0], clip=0.05), [[0, 0, s / 3]])


@many
@given(mask=masks(), seed=seeds, mode=st.sampled_from(AGGREGATIONS), dual=st.none() | st.floats(1.1, 4))
def test_with_one_advantage_per_sequence_gspo_is_the_ratio_of_the_sequence(mask, seed, mode, dual):
    """The preset's loss and gradient are those of eq. 7 of arXiv 2507.18071, differentiated through the mean."""
    logprobs, old = noise(mask, seed).requires_grad_(), noise(mask, seed + 1)
    advantages = noise(mask, seed + 2, poison=False)[:, :1].expand_as(mask)
    result = policy_loss(
        logprobs, old, advantages, mask, clip_low=0.5, clip_high=0.5, dual_clip=dual, level="sequence", aggregation=mode
    )
    losses = torch.zeros_like(mask)
    for row in range(len(mask)):
        if (kept := mask[row].bool()).any():
            s, advantage = (logprobs[row][kept] - old[row][kept]).mean().exp(), advantages[row, 0]
            loss = torch.maximum(-s * advantage, -s.clamp(0.5, 1.5) * advantage)
            if dual is not None and advantage < 0:
                loss = torch.minimum(loss, -dual * advantage)
            losses[row] = loss
    expected = aggregate(losses, mask, mode=mode)
    assert_close(result.loss, expected.detach())
    assert_close(torch.autograd.grad(result.loss, logprobs)[0], torch.autograd.grad(expected, logprobs)[0])


def test_before_the_first_update_the_policy_gradient_is_the_advantage():
    # ratio 1, so d loss / d logp = -A / tokens
    logprobs = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    advantages, mask = torch.tensor([[1.0, -2.0, 5.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    result = policy_loss(logprobs, logprobs.detach(), advantages, mask, clip_low=0.2, clip_high=0.2)
    result.loss.backward()
    assert_close(result.ratio, 1.0)
    assert_close(logprobs.grad, [[-0.5, 1.0, 0.0]])
