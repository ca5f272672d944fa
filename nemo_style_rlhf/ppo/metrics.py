"""What a rollout looks like in numbers, and on disk."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nemo_style_rlhf.algorithms.masking import masked_mean
from nemo_style_rlhf.rollout.sampling import Sampled
from nemo_style_rlhf.rollout.types import Experience, Rollout

REPEATED_NGRAM = 4
EXCERPT_WIDTH = 72
"""Characters of a text in a warning."""


def rollout_metrics(experience: Experience) -> dict[str, float]:
    """`train_rollouts/*`: means over samples (rewards, lengths) or over learned tokens (KL, entropy, advantages).

    ``rewards_with_kl`` and ``init_policy_kl_per_sample`` are means over samples with a learned token: the others add nothing.
    """
    mask = experience.mask
    learned_samples = sum(bool(part.any()) for part in mask.split(experience.lengths))
    metrics = {
        **_sample_metrics(experience.rollouts),
        "rewards": _mean(experience.scores),
        "rewards_std": float(experience.scores[~experience.failed].std(correction=0)),
        "rewards_with_kl": float((experience.rewards * mask).sum() / learned_samples),
        "reward_failures": float(experience.failed.sum()),
        "entropy": float(-masked_mean(experience.logprobs, mask)),
        "learned_tokens": float(mask.sum()),
        **{name: _mean(values) for name, values in experience.extra.items()},
        **experience.counts,
    }
    if experience.sampler_logprobs is not None:
        gap = (experience.sampler_logprobs - experience.logprobs).abs()[mask.bool()]
        metrics |= {"sampler_logprob_gap_max": float(gap.max()), "sampler_logprob_gap_mean": float(gap.mean())}
    if experience.ref_logprobs is not None:
        metrics["init_policy_kl"] = float(masked_mean(experience.kl, mask))
        metrics["init_policy_kl_per_sample"] = float((experience.kl * mask).sum() / learned_samples)
        metrics["kl_coef"] = experience.kl_coef
    if experience.values is not None:
        metrics["values"] = float(masked_mean(experience.values, mask))
    if experience.returns is not None:
        metrics["returns"] = float(masked_mean(experience.returns, mask))
    if experience.correction is not None:
        metrics |= _correction_metrics(experience.correction[mask.bool()])
    return {f"train_rollouts/{name}": value for name, value in metrics.items()}


def _correction_metrics(weights: Tensor) -> dict[str, float]:
    """Describe the importance weights [n] of the loss tokens by mean, share of zeros, and the share of the tokens that equal
    weights would need for the same variance, (sum w)^2 / (n sum w^2) (Kish's effective sample size); 0 if all weights are."""
    weights = weights.double()
    squares = float(weights.square().sum())
    return {
        "correction_weight": float(weights.mean()),
        "correction_masked_fraction": float((weights == 0).double().mean()),
        "correction_ess": float(weights.sum()) ** 2 / (len(weights) * squares) if squares else 0.0,
    }


def validation_metrics(sampled: Sampled, *, pass_score: float | None) -> dict[str, float]:
    """`val_rollouts/*`; with ``pass_score`` also the share of samples, and of prompts with any sample, that reach it.

    ``pass@k`` is over the k samples each prompt has (arXiv 2107.03374, section 2.1, with n = k).
    """
    scores = sampled.scores.rewards
    metrics = {
        **_sample_metrics(sampled.rollouts),
        "rewards": _mean(scores),
        "reward_failures": float(sampled.scores.failures.sum()),
        **{name: _mean(values) for name, values in sampled.scores.extra.items()},
    }
    if pass_score is not None:
        passed: dict[int, list[bool]] = defaultdict(list)
        # Comparing a tensor rounds pass_score to fp32, as the scores were: as a Python float .9 is above the score .9.
        for rollout, reached in zip(sampled.rollouts, (scores >= pass_score).tolist(), strict=True):
            passed[rollout.sample.prompt_id].append(reached)
        k = max(map(len, passed.values()))
        metrics["pass@1"] = sum(sum(each) / len(each) for each in passed.values()) / len(passed)
        if k > 1:
            metrics[f"pass@{k}"] = sum(any(each) for each in passed.values()) / len(passed)
    return {f"val_rollouts/{name}": value for name, value in metrics.items()}


def _sample_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    responses = [rollout.response_tokens for rollout in rollouts]
    lengths = [len(response) for response in responses]
    bigrams = [pair for response in responses for pair in pairwise(response)]
    return {
        "response_lengths": sum(lengths) / len(lengths),
        "response_lengths_max": float(max(lengths)),
        "truncated_fraction": sum(rollout.truncated for rollout in rollouts) / len(rollouts),
        "distinct_fraction": len(set(map(tuple, responses))) / len(rollouts),
        "distinct_2": len(set(bigrams)) / max(len(bigrams), 1),
        "repetition": sum(map(repetition, responses)) / len(responses),
    }


def repetition(tokens: Sequence[int]) -> float:
    """Share of the 4-grams of a response that occurred in it before; 0 without any."""
    ngrams = [tuple(tokens[start : start + REPEATED_NGRAM]) for start in range(len(tokens) - REPEATED_NGRAM + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def _mean(values: Tensor) -> float:
    """Of the samples that have a number."""
    return float(values.nanmean())


def rollout_rows(experience: Experience, tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, Any]]:
    """One object per sample for `rollouts/step_XXXXXX.jsonl`; ``kl`` is summed over the response, in nats."""
    kl = (experience.kl * experience.mask).split(experience.lengths)
    measured = experience.ref_logprobs is not None
    for index, (rollout, sample_kl) in enumerate(zip(experience.rollouts, kl, strict=True)):
        yield {
            "prompt_id": rollout.sample.prompt_id,
            "index": rollout.sample.index,
            "prompt": rollout.prompt_text,
            "response": tokenizer.decode(rollout.response_tokens, skip_special_tokens=False),
            "reward": _number(experience.scores[index]),
            "kl": float(sample_kl.sum()) if measured else None,
            "response_tokens": len(rollout.response_tokens),
            "finish_reason": rollout.finish_reason,
            "label": rollout.label,
            **{name: _number(values[index]) for name, values in experience.extra.items()},
        }


def _number(value: Tensor) -> float | None:
    """JSON has neither infinity nor NaN, which stands for the number that a failed sample lacks."""
    return float(value) if value.isfinite() else None


def excerpts(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Show the samples of :func:`rollout_rows` with the highest and the lowest reward, a short line each.

    Control characters are escaped: what a policy writes must not move a terminal's cursor.
    """
    scored = sorted((row for row in rows if row["reward"] is not None), key=lambda row: row["reward"])
    ends = [scored[-1], scored[0]] if len(scored) > 1 else scored
    return [
        f"reward {row['reward']:.4g}: {_excerpt(row['prompt'], EXCERPT_WIDTH // 2)} -> {_excerpt(row['response'])}"
        for row in ends
    ]


def _excerpt(text: str, width: int = EXCERPT_WIDTH) -> str:
    shown = repr(text[:width])
    return shown if len(text) <= width and len(shown) <= width + 2 else f"{shown[:width]}..."
