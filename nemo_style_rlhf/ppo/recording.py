"""A step's samples as `rollouts/` holds them."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_style_rlhf.rollout.logprobs import action_aligned
from nemo_style_rlhf.rollout.types import Experience
from nemo_style_rlhf.tracking.rollout_files import Array, StepSamples


def step_samples(step: int, experience: Experience, new_logprobs: Tensor | None) -> StepSamples:
    """Collect the samples of a step. ``new_logprobs``, [N] nats, has the log-probabilities of the loss tokens when the
    update last computed them; None if the policy was not updated."""
    rollouts, scores = experience.rollouts, experience.scores
    learned = experience.mask.bool()

    def of_actions(flat: Tensor) -> Array:
        return flat.float().numpy()

    def of_loss_tokens(flat: Tensor | None) -> Array | None:
        return None if flat is None else of_actions(torch.where(learned, flat.float(), math.nan))

    def of_rollouts(per_episode: list[Any]) -> list[Any]:
        return [value for value, count in zip(per_episode, experience.branches, strict=True) for _ in range(count)]

    logprobs, reference = experience.logprobs, experience.ref_logprobs
    sampler = experience.sampler_logprobs
    return StepSamples(
        step=step,
        lengths=experience.lengths,
        prompt_tokens=[rollout.prompt_length for rollout in rollouts],
        response_tokens=[rollout.response_length for rollout in rollouts],
        turns=[[(turn.start, turn.end, turn.finish_reason) for turn in rollout.turns] for rollout in rollouts],
        tokens=experience.tokens.numpy().astype(np.int32),
        per_sample={
            "prompt_id": [rollout.sample.prompt_id for rollout in rollouts],
            "index": [rollout.sample.index for rollout in rollouts],
            "prompt": [rollout.prompt_text for rollout in rollouts],
            "label": [rollout.prompt.label for rollout in rollouts],
            "finish_reason": [rollout.finish_reason for rollout in rollouts],
            "reward": of_rollouts(_numbers(scores.rewards)),
            "failed": of_rollouts(scores.failures.tolist()),
        },
        scores={name: of_rollouts(_numbers(values)) for name, values in scores.extra.items()},
        mask=learned.numpy(),
        weights_versions=action_aligned([rollout.weights_version for rollout in rollouts]).numpy().astype(np.int32),
        per_token={
            "sampler_logprobs": None if sampler is None else of_actions(sampler),
            "logprobs": of_actions(logprobs),
            "ref_logprobs": None if reference is None else of_actions(reference),
            "values": of_loss_tokens(scores.values),
            "rewards": of_loss_tokens(experience.rewards),
            "kl": None if reference is None else of_loss_tokens(experience.kl),
            "advantages": of_loss_tokens(experience.advantages),
            "returns": of_loss_tokens(experience.returns),
            "ratios": None if new_logprobs is None else of_loss_tokens((new_logprobs - logprobs).exp()),
        },
    )


def _numbers(values: Tensor) -> list[float | None]:
    """Replace infinity, and the NaN that marks a failed sample, by None."""
    return [number if math.isfinite(number) else None for number in values.tolist()]
