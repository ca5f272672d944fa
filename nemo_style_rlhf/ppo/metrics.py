"""Metrics of rollouts and steps under their full names."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_style_rlhf.algorithms.masking import masked_mean
from nemo_style_rlhf.data.ragged import pad
from nemo_style_rlhf.rollout.producer import Timers
from nemo_style_rlhf.rollout.types import Experience, Rollout, Sampled, episodes, sums

Array = np.ndarray[Any, Any]
REPEATED_NGRAM = 4
HASH_FACTOR, HASH_STEP = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)
"""Odd constants without a bit pattern, for the n-gram hash."""
OF_AGENTS = ("agent/", "environment/")
CRITIC_CLOCK = {
    "seconds": "timers/critic_train",
    "rss_gib": "memory/critic_rss_gib",
    "cuda_peak_gib": "memory/critic_cuda_peak_gib",
}
"""Metrics of the critic's train step that depend on clock and machine, by their names in its answer."""
EXCERPT_WIDTH = 72
"""Maximum number of characters of a text in a warning."""


def rollout_metrics(experience: Experience) -> dict[str, float]:
    """`train_rollouts/*`: means over samples (rewards, lengths) or over loss tokens (KL, entropy, advantages); without
    :func:`repetition_metrics`.

    ``rewards_with_kl`` and ``init_policy_kl_per_sample`` are means over the samples that have a loss token.
    """
    mask = experience.mask
    scores = experience.scores
    learned_samples = int(pad(mask, sums(experience.lengths, experience.branches)).any(-1).sum())
    metrics = {
        **_sample_metrics(experience.rollouts),
        "rewards": _mean(scores.rewards),
        "rewards_std": float(scores.rewards[~scores.failures].std(correction=0)),
        "rewards_with_kl": float((experience.rewards * mask).sum() / learned_samples),
        "reward_failures": float(scores.failures.sum()),
        # Over stale samples, it is the cross entropy between the sampling policies and the trained one.
        "cross_entropy" if experience.stale else "entropy": float(-masked_mean(experience.logprobs, mask)),
        "learned_tokens": float(mask.sum()),
        **{name: _mean(values) for name, values in scores.extra.items()},
        **experience.counts,
    }
    if experience.sampler_logprobs is not None and not experience.stale:
        gap = (experience.sampler_logprobs - experience.logprobs).abs()[mask.bool()]
        metrics |= {"sampler_logprob_gap_max": float(gap.max()), "sampler_logprob_gap_mean": float(gap.mean())}
    if experience.ref_logprobs is not None:
        metrics["init_policy_kl"] = float(masked_mean(experience.present_kl, mask))
        metrics["init_policy_kl_per_sample"] = float((experience.present_kl * mask).sum() / learned_samples)
        metrics["kl_coef"] = experience.kl_coef
    if scores.values is not None:
        metrics["values"] = float(masked_mean(scores.values, mask))
    if experience.returns is not None:
        metrics["returns"] = float(masked_mean(experience.returns, mask))
    if experience.correction is not None:
        metrics |= _correction_metrics(experience.correction[mask.bool()])
    return _named("train_rollouts", metrics) | _staleness_metrics(experience)


def _named(of: str, metrics: dict[str, float]) -> dict[str, float]:
    """Metrics of samples under their full names; in training, an environment's metrics have a group of their own."""
    grouped = of == "train_rollouts"
    return {name if grouped and name.startswith(OF_AGENTS) else f"{of}/{name}": each for name, each in metrics.items()}


def _staleness_metrics(experience: Experience) -> dict[str, float]:
    """`async/*` of stale samples: versions by which the weights before the update are newer than the weights that sampled the
    learned tokens, and the mean change of the tokens' log-probabilities in between, in nats."""
    if not experience.stale:
        return {}
    assert experience.sampler_logprobs is not None  # AlgorithmConfig
    learned, rollouts = experience.mask.bool(), experience.rollouts
    # The state before a token is one place before the token itself.
    versions = torch.cat([rollout.weights_version.roll(-1) for rollout in rollouts])[learned]
    behind = (rollouts[0].sample.step - 1 - versions).float()
    drift = (experience.sampler_logprobs - experience.logprobs)[learned].abs().mean()
    return {
        "async/staleness_mean": float(behind.mean()),
        "async/staleness_max": float(behind.max()),
        "async/policy_drift": float(drift),
    }


def repetition_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The `train_rollouts/*` of :func:`ngram_metrics`. They take a while, and may be computed in another thread."""
    found = ngram_metrics([rollout.response_tokens.numpy() for rollout in rollouts])
    return {f"train_rollouts/{name}": value for name, value in found.items()}


def _correction_metrics(weights: Tensor) -> dict[str, float]:
    """Describe the importance weights [n] of the loss tokens by their mean, the share of zeros, and Kish's effective sample
    size as a share of n, (sum w)^2 / (n sum w^2), which is 0 if all weights are 0."""
    weights = weights.double()
    squares = float(weights.square().sum())
    return {
        "correction_weight": float(weights.mean()),
        "correction_masked_fraction": float((weights == 0).double().mean()),
        "correction_ess": float(weights.sum()) ** 2 / (len(weights) * squares) if squares else 0.0,
    }


def critic_metrics(answer: Mapping[str, float]) -> dict[str, float]:
    """`critic/*` from the critic's answer to a train step."""
    return {CRITIC_CLOCK.get(name, f"critic/{name}"): value for name, value in answer.items()}


def timer_metrics(timers: Timers, experience: Experience) -> dict[str, float]:
    """`timers/*`: seconds of each phase and of the whole step, and its tokens and samples per second."""
    total = sum(timers.seconds.values())
    tokens = float(sum(rollout.response_length for rollout in experience.rollouts))
    return {
        **{f"timers/{phase}": seconds for phase, seconds in timers.seconds.items()},
        "timers/step": total,
        "timers/tokens_per_second": tokens / total,
        "timers/samples_per_second": len(experience.branches) / total,
    }


def validation_metrics(sampled: Sampled, *, pass_score: float | None) -> dict[str, float]:
    """`val_rollouts/*`; with ``pass_score`` also the share of samples that reach it, and of prompts with such a sample.

    ``pass@k`` is over the k samples of each prompt (arXiv 2107.03374, section 2.1, with n = k).
    """
    scores = sampled.scores.rewards
    metrics = {
        **_sample_metrics(sampled.rollouts),
        **ngram_metrics([rollout.response_tokens.numpy() for rollout in sampled.rollouts]),
        "rewards": _mean(scores),
        "reward_failures": float(sampled.scores.failures.sum()),
        **{name: _mean(values) for name, values in sampled.scores.extra.items()},
    }
    if pass_score is not None:
        passed: dict[int, list[bool]] = defaultdict(list)
        # Comparing with a tensor rounds pass_score to fp32, like the scores: the Python float .9 is above the fp32 score .9.
        for (rollout, *_), reached in zip(episodes(sampled.rollouts), (scores >= pass_score).tolist(), strict=True):
            passed[rollout.sample.prompt_id].append(reached)
        k = max(map(len, passed.values()))
        metrics["pass@1"] = sum(sum(each) / len(each) for each in passed.values()) / len(passed)
        if k > 1:
            metrics[f"pass@{k}"] = sum(any(each) for each in passed.values()) / len(passed)
    return _named("val_rollouts", metrics)


def _sample_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    every = episodes(rollouts)
    lengths = [sum(rollout.response_length for rollout in branches) for branches in every]
    return {
        "response_lengths": sum(lengths) / len(lengths),
        "response_lengths_max": float(max(lengths)),
        "truncated_fraction": sum(branches[0].truncated for branches in every) / len(every),
    }


def ngram_metrics(responses: Sequence[Array]) -> dict[str, float]:
    """Measure repetition in responses, int64 [length] each: ``distinct_fraction``, the share of distinct responses;
    ``distinct_2``, the share of distinct bigrams among all bigrams; and ``repetition``, the mean share of a response's 4-grams
    that occurred in it before, 0 for a response without 4-grams.

    N-grams are counted by a 64-bit hash: a million of them collide once in ten million rollouts.
    """
    bigrams = np.concatenate(ngram_hashes(responses, 2))
    fourgrams = ngram_hashes(responses, REPEATED_NGRAM)
    repetition = [1 - count_distinct(hashes) / len(hashes) if len(hashes) else 0.0 for hashes in fourgrams]
    return {
        "distinct_fraction": len({response.tobytes() for response in responses}) / len(responses),
        "distinct_2": count_distinct(bigrams) / max(len(bigrams), 1),
        "repetition": sum(repetition) / len(repetition),
    }


def ngram_hashes(responses: Sequence[Array], n: int) -> list[Array]:
    """For each response, uint64 [max(length - n + 1, 0)]: a polynomial in the ``n`` tokens that start at each position, modulo
    2^64.

    A few passes over all responses rather than many small ones, since those would compete with training for Python's lock.
    """
    tokens = np.concatenate([*responses, np.zeros(n, dtype=np.int64)]).astype(np.uint64)
    hashes = np.zeros(len(tokens) - n, dtype=np.uint64)
    for offset in range(n):
        hashes *= HASH_FACTOR
        hashes += tokens[offset : offset + len(hashes)]
        hashes += HASH_STEP
    lengths = [len(response) for response in responses]
    parts = np.split(hashes, np.cumsum(lengths)[:-1])
    return [part[: max(length - n + 1, 0)] for part, length in zip(parts, lengths, strict=True)]


def count_distinct(hashes: Array) -> int:
    ordered = np.sort(hashes)
    return int((ordered[1:] != ordered[:-1]).sum()) + min(len(ordered), 1)


def _mean(values: Tensor) -> float:
    """Mean over the samples whose value is not NaN."""
    return float(values.nanmean())


def excerpts(rewards: Sequence[float], texts: Callable[[int], tuple[str, str]]) -> list[str]:
    """A short line for each of the samples with the highest and the lowest reward; a NaN reward is ignored.

    Control characters are escaped: a policy's text must not move a terminal's cursor.

    Args:
        texts: returns prompt and response of a sample.
    """
    order = sorted((row for row, reward in enumerate(rewards) if math.isfinite(reward)), key=lambda row: rewards[row])
    lines = []
    for row in [order[-1], order[0]] if len(order) > 1 else order:
        prompt, response = texts(row)
        lines.append(f"reward {rewards[row]:.4g}: {_excerpt(prompt, EXCERPT_WIDTH // 2)} -> {_excerpt(response)}")
    return lines


def _excerpt(text: str, width: int = EXCERPT_WIDTH) -> str:
    shown = repr(text[:width])
    return shown if len(text) <= width and len(shown) <= width + 2 else f"{shown[:width]}..."
