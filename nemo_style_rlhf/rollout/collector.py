"""One rollout: generate, score while decoding goes on, compute log-probabilities, shape rewards."""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from nemo_style_rlhf.algorithms.advantages import gae
from nemo_style_rlhf.algorithms.kl import kl_estimate
from nemo_style_rlhf.algorithms.masking import masked_whiten
from nemo_style_rlhf.algorithms.reward_shaping import place_rewards, truncation_penalty
from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.data.ragged import pad, unpad
from nemo_style_rlhf.generation.interface import GenerationRequest, Generator, SampleId, sample_seed
from nemo_style_rlhf.rollout.logprobs import PolicyForward, action_aligned, action_mask, batch_logprobs
from nemo_style_rlhf.rollout.reference import Reference
from nemo_style_rlhf.rollout.types import Experience, Rollout
from nemo_style_rlhf.schema.actor import PPOConfig
from nemo_style_rlhf.schema.common import EngineConfig
from nemo_style_rlhf.scoring.interface import Scorer, Scores

SCORING_GROUP = 32
"""Samples per scoring request: small enough that scoring starts early, large enough that the server's batches are full."""


class NothingToLearnError(RuntimeError):
    """A whole rollout is masked: a step on it would silently learn nothing."""


@dataclass
class Scored:
    """Finished samples in the order of their requests, with their scores."""

    rollouts: list[Rollout]
    scores: Tensor
    """[B] float32."""
    values: Tensor
    """[N] float32, action-aligned."""


@dataclass
class Timers:
    """Seconds spent waiting for each phase of one step."""

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=perf_counter)

    def lap(self, phase: str) -> None:
        """Charge the time since the last lap to ``phase``."""
        now = perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


def make_requests(
    prompts: Sequence[Prompt],
    *,
    step: int,
    samples_per_prompt: int,
    max_tokens: int,
    run_seed: int,
    greedy: bool = False,
) -> list[GenerationRequest]:
    """``samples_per_prompt`` requests for each prompt; a prompt that occurs again counts its samples on."""
    seen: Counter[int] = Counter()
    requests = []
    for prompt in prompts:
        for _ in range(samples_per_prompt):
            sample = SampleId(step, prompt.prompt_id, seen[prompt.prompt_id])
            seen[prompt.prompt_id] += 1
            requests.append(
                GenerationRequest(sample, tuple(prompt.token_ids), sample_seed(run_seed, sample), max_tokens, greedy)
            )
    return requests


def generate_and_score(
    generator: Generator,
    scorer: Scorer,
    requests: Sequence[GenerationRequest],
    prompts: dict[int, Prompt],
    timers: Timers,
) -> tuple[list[Rollout], list[Future[Scores]]]:
    """Generate every request; a group of ``SCORING_GROUP`` neighbours is sent to be scored as soon as it is complete.

    Groups are cut by position in ``requests``, never by who finished first, so the scorer's batches are repeatable.

    Returns:
        Rollouts in the order of ``requests``, and the futures of the groups in order.
    """
    slots = {request.sample: slot for slot, request in enumerate(requests)}
    rollouts: list[Rollout | None] = [None] * len(requests)
    starts = range(0, len(requests), SCORING_GROUP)
    missing = [len(requests[start : start + SCORING_GROUP]) for start in starts]
    futures: dict[int, Future[Scores]] = {}
    generator.submit(requests)
    for completion in generator.completed():
        slot = slots[completion.request.sample]
        prompt = prompts[completion.request.sample.prompt_id]
        rollouts[slot] = Rollout.from_completion(completion, prompt.text, prompt.label, prompt.metadata)
        group = slot // SCORING_GROUP
        missing[group] -= 1
        if missing[group] == 0:
            members = rollouts[group * SCORING_GROUP : (group + 1) * SCORING_GROUP]
            futures[group] = scorer.score([rollout.tokens for rollout in members if rollout is not None])
    timers.lap("generate")
    return [rollout for rollout in rollouts if rollout is not None], [futures[group] for group in range(len(starts))]


def await_scores(futures: Sequence[Future[Scores]]) -> tuple[Tensor, Tensor]:
    """Scores [B] and values [N]; raises what a scoring request raised."""
    results = [future.result() for future in futures]
    return torch.cat([result.rewards for result in results]), torch.cat([result.values for result in results])


class Collector:
    """Makes the Experience of a step from its requests."""

    def __init__(
        self, generator: Generator, scorer: Scorer, policy: PolicyForward, reference: Reference, *,
        algorithm: PPOConfig, engine: EngineConfig, device: torch.device,
    ) -> None:  # fmt: skip
        self._generator = generator
        self._scorer = scorer
        self._policy = policy
        self._reference = reference
        self._algorithm = algorithm
        self._engine = engine
        self._device = device

    def collect(self, requests: Sequence[GenerationRequest], prompts: dict[int, Prompt], timers: Timers) -> Experience:
        """Steps 2 to 4 of a PPO step; scoring overlaps decoding and the log-probabilities.

        Raises:
            NothingToLearnError: no sample has an action to learn from.
        """
        rollouts, futures = generate_and_score(self._generator, self._scorer, requests, prompts, timers)
        lengths = [len(rollout.tokens) for rollout in rollouts]
        tokens = torch.cat([rollout.tokens for rollout in rollouts])
        mask = self._mask(rollouts, lengths)
        sampler_logprobs = torch.cat([action_aligned(rollout.sampler_logprobs) for rollout in rollouts]) * mask
        if self._algorithm.old_logprobs == "sampler":
            logprobs = sampler_logprobs
        else:
            logprobs = batch_logprobs(self._policy, tokens, lengths, mask, self._engine, self._device)
        timers.lap("logprobs")
        ref_logprobs = self._reference.logprobs(tokens, lengths, mask)
        timers.lap("reference_logprobs")
        scores, values = await_scores(futures)
        timers.lap("wait_for_scores")
        return self._experience(
            rollouts, lengths, tokens, mask, sampler_logprobs, logprobs, ref_logprobs, scores, values
        )

    def generate_scored(
        self, requests: Sequence[GenerationRequest], prompts: dict[int, Prompt], timers: Timers
    ) -> Scored:
        """Generate and score only: validation."""
        rollouts, futures = generate_and_score(self._generator, self._scorer, requests, prompts, timers)
        return Scored(rollouts, *await_scores(futures))

    def _mask(self, rollouts: Sequence[Rollout], lengths: Sequence[int]) -> Tensor:
        mask = action_mask(rollouts)
        if self._algorithm.truncated_samples == "mask":
            kept = torch.tensor([float(not rollout.truncated) for rollout in rollouts])
            mask *= kept.repeat_interleave(torch.tensor(lengths))
        if not mask.any():
            raise NothingToLearnError(
                f"all {len(rollouts)} samples of this step were truncated and algorithm.truncated_samples=mask: "
                "nothing would be learned; raise generation.max_length or use keep or penalise"
            )
        return mask

    def _experience(
        self, rollouts: list[Rollout], lengths: list[int], tokens: Tensor, mask: Tensor, sampler_logprobs: Tensor,
        logprobs: Tensor, ref_logprobs: Tensor, scores: Tensor, values: Tensor,
    ) -> Experience:  # fmt: skip
        algorithm = self._algorithm
        kl = kl_estimate(logprobs, ref_logprobs, kind=algorithm.kl_estimator)
        shaped = scores
        if algorithm.truncated_samples == "penalise":
            truncated = torch.tensor([rollout.truncated for rollout in rollouts])
            shaped = truncation_penalty(scores, truncated, coef=algorithm.truncation_penalty)
        padded_mask = pad(mask, lengths)
        rewards = place_rewards(shaped, pad(kl, lengths), padded_mask, kl_coef=algorithm.initial_policy_kl_penalty)
        advantages, returns = gae(
            rewards, pad(values, lengths), padded_mask, gamma=algorithm.discount_factor, lam=algorithm.gae_lambda
        )
        if algorithm.normalize_advantages:
            advantages = masked_whiten(advantages, padded_mask)
        return Experience(
            rollouts=rollouts,
            lengths=lengths,
            tokens=tokens,
            mask=mask,
            sampler_logprobs=sampler_logprobs,
            logprobs=logprobs,
            ref_logprobs=ref_logprobs,
            scores=scores,
            values=values,
            kl=kl,
            rewards=unpad(rewards, lengths),
            advantages=unpad(advantages, lengths),
            returns=unpad(returns, lengths),
        )
