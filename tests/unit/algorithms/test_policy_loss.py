"""PPO's mathematics against loop-written float64 references and numbers derived by hand."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_style_rlhf.algorithms.advantages import discounted_returns, gae
from nemo_style_rlhf.algorithms.corrections import importance_weights
from nemo_style_rlhf.algorithms.kl import kl_estimate, kl_loss
from nemo_style_rlhf.algorithms.masking import aggregate, masked_mean, masked_whiten
from nemo_style_rlhf.algorithms.names import AGGREGATIONS, CORRECTIONS
from nemo_style_rlhf.algorithms.policy_loss import policy_loss
from nemo_style_rlhf.algorithms.reward_shaping import place_rewards, truncation_penalty
from nemo_style_rlhf.algorithms.value_loss import value_loss

from . import reference
from .reference import assert_close, masks, noise, selected

many = settings(max_examples=200, deadline=None)
seeds = st.integers(0, 2**31)
unit = st.floats(0, 1)


@many
@given(mask=masks(), seed=seeds, gamma=unit, lam=unit)
def test_gae_is_the_discounted_sum_of_residuals_over_response_tokens(mask, seed, gamma, lam):
    rewards, values = noise(mask, seed), noise(mask, seed + 1)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    assert_close(advantages, reference.gae(rewards, values, mask, gamma, lam))
    assert_close(returns, advantages + values.nan_to_num())


def test_gae_by_hand():
    # gamma 0.5, lambda 0.5; delta = [0 + .5*2 - 1, 4 - 2] = [0, 2]; A_1 = 2, A_0 = 0 + .25*2 = .5
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    advantages, returns = gae(torch.tensor([[0.0, 4, 9]]), torch.tensor([[1.0, 2, 9]]), mask, gamma=0.5, lam=0.5)
    assert_close(advantages, [[0.5, 2, 0]])
    assert_close(returns, [[1.5, 4, 0]])


def test_gae_skips_a_gap_instead_of_decaying_through_it():
    # lambda .95, a reward of 1 behind a gap of 4 tokens: one decay, .95, not .95^5 = .774
    mask = torch.tensor([[1.0, 0, 0, 0, 0, 1]])
    rewards = torch.tensor([[0.0, 0, 0, 0, 0, 1]])
    advantages, _ = gae(rewards, torch.zeros(1, 6), mask, gamma=1.0, lam=0.95)
    torch.testing.assert_close(advantages[0, 0], torch.tensor(0.95))


@many
@given(mask=masks(), seed=seeds, gamma=unit)
def test_discounted_returns_follow_their_recursion(mask, seed, gamma):
    rewards = noise(mask, seed)
    expected = torch.zeros_like(mask)
    for row in range(len(mask)):
        following = 0.0
        for t in reversed(range(mask.shape[1])):
            if mask[row, t]:
                following = float(rewards[row, t]) + gamma * following
                expected[row, t] = following
    assert_close(discounted_returns(rewards, mask, gamma=gamma), expected)


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
    centred = values - values.mean()
    whitened = centred * (centred.square().sum() / max(len(values) - 1, 1) + 1e-8).rsqrt()
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


def test_unknown_names_are_refused():
    mask = torch.ones(1, 1)
    with pytest.raises(ValueError, match="aggregation 'mean'"):
        aggregate(mask, mask, mode="mean")
    with pytest.raises(ValueError, match="KL estimator 'k9'"):
        kl_estimate(mask, mask, kind="k9")
    with pytest.raises(ValueError, match="level 'word'"):
        policy_loss(mask, mask, mask, mask, clip_low=0.2, clip_high=0.2, level="word")


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


def test_a_mask_in_half_precision_counts_right():
    mask = torch.ones(1, 1001, dtype=torch.bfloat16)  # its sum is 1000 there
    assert float(masked_mean(torch.ones(1, 1001), mask)) == 1
    assert float(aggregate(torch.ones(1, 1001), mask, mode="seq_mean_token_mean")) == 1


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


def test_a_value_within_the_clip_range_is_not_clipped():
    # old + (V - old) is not V in binary: of these values, some would seem clipped by one rounding
    values, old, returns = torch.randn(3, 1, 1000, generator=torch.Generator().manual_seed(0))
    result = value_loss(values, old, returns, torch.ones(1, 1000), clip=10.0)
    assert float(result.clip_fraction) == 0


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


def test_the_score_lands_on_the_last_response_token_beside_the_kl_penalty():
    mask = torch.tensor([[0.0, 1, 0, 1, 0], [0, 0, 0, 0, 0]])
    kl = torch.tensor([[math.nan, 2, 7, 3, 1]], dtype=torch.float64).repeat(2, 1)
    rewards = place_rewards(torch.tensor([10.0, 5.0]), kl, mask, kl_coef=0.1)
    assert_close(rewards, [[0, -0.2, 0, 9.7, 0], [0, 0, 0, 0, 0]])


def test_truncated_samples_pay():
    scores = truncation_penalty(torch.tensor([1.0, 2.0]), torch.tensor([True, False]), coef=-1.0)
    assert_close(scores, [0.0, 2.0])
