"""What a rollout looks like in numbers, and on disk."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from nemo_style_rlhf.algorithms.masking import masked_mean
from nemo_style_rlhf.rollout.collector import Scored
from nemo_style_rlhf.rollout.types import Experience, Rollout


def rollout_metrics(experience: Experience) -> dict[str, float]:
    """`train_rollouts/*`: means over samples (rewards, lengths) or over learned tokens (KL, entropy, advantages)."""
    mask = experience.mask
    gap = (experience.sampler_logprobs - experience.logprobs).abs()[mask.bool()]
    kl_sums = torch.stack([part.sum() for part in (experience.kl * mask).split(experience.lengths)])
    return {
        **_sample_metrics("train_rollouts", experience.rollouts),
        "train_rollouts/rewards": float(experience.scores.mean()),
        "train_rollouts/rewards_std": float(experience.scores.std(correction=0)),
        "train_rollouts/rewards_with_kl": float((experience.rewards * mask).sum() / len(experience.lengths)),
        "train_rollouts/init_policy_kl": float(masked_mean(experience.kl, mask)),
        "train_rollouts/init_policy_kl_per_sample": float(kl_sums.mean()),
        "train_rollouts/entropy": float(-masked_mean(experience.logprobs, mask)),
        "train_rollouts/values": float(masked_mean(experience.values, mask)),
        "train_rollouts/returns": float(masked_mean(experience.returns, mask)),
        "train_rollouts/sampler_logprob_gap_max": float(gap.max()),
        "train_rollouts/sampler_logprob_gap_mean": float(gap.mean()),
        "train_rollouts/learned_tokens": float(mask.sum()),
    }


def validation_metrics(scored: Scored) -> dict[str, float]:
    """`val_rollouts/*`."""
    return {**_sample_metrics("val_rollouts", scored.rollouts), "val_rollouts/rewards": float(scored.scores.mean())}


def _sample_metrics(prefix: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    lengths = [len(rollout.response_tokens) for rollout in rollouts]
    return {
        f"{prefix}/response_lengths": sum(lengths) / len(lengths),
        f"{prefix}/response_lengths_max": float(max(lengths)),
        f"{prefix}/truncated_fraction": sum(rollout.truncated for rollout in rollouts) / len(rollouts),
        f"{prefix}/distinct_fraction": len({tuple(rollout.response_tokens) for rollout in rollouts}) / len(rollouts),
    }


def rollout_rows(experience: Experience, tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, Any]]:
    """One object per sample for `rollouts/step_XXXXXX.jsonl`; ``kl`` is summed over the response, in nats."""
    kl = (experience.kl * experience.mask).split(experience.lengths)
    for rollout, score, sample_kl in zip(experience.rollouts, experience.scores.tolist(), kl, strict=True):
        yield {
            "prompt_id": rollout.sample.prompt_id,
            "index": rollout.sample.index,
            "prompt": rollout.prompt_text,
            "response": tokenizer.decode(rollout.response_tokens, skip_special_tokens=False),
            "reward": score,
            "kl": float(sample_kl.sum()),
            "response_tokens": len(rollout.response_tokens),
            "finish_reason": rollout.finish_reason,
            "label": rollout.label,
        }
