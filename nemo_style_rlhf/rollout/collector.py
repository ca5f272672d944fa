"""One rollout: generate, score while decoding goes on, compute log-probabilities, turn scores into advantages."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nemo_style_rlhf.algorithms.corrections import importance_weights
from nemo_style_rlhf.algorithms.kl import AdaptiveKLController, FixedKLController, kl_estimate
from nemo_style_rlhf.algorithms.masking import masked_mean
from nemo_style_rlhf.algorithms.reward_shaping import RunningNormalizer
from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.data.ragged import pad, unpad
from nemo_style_rlhf.data.ranks import Ranks
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.generation.interface import GenerationRequest, Generator
from nemo_style_rlhf.rollout.logprobs import PolicyForward, action_aligned, action_mask, batch_logprobs
from nemo_style_rlhf.rollout.reference import Reference
from nemo_style_rlhf.rollout.sampling import (
    Decode,
    Pending,
    Sampled,
    Timers,
    generate_and_score,
    joined,
    make_requests,
)
from nemo_style_rlhf.rollout.signal import estimate, shape_scores
from nemo_style_rlhf.rollout.types import Experience, Rollout
from nemo_style_rlhf.schema.algorithm import AlgorithmConfig
from nemo_style_rlhf.schema.common import EngineConfig
from nemo_style_rlhf.scoring.interface import Scorer, Scores


class NothingToLearnError(UserError):
    """A whole rollout is masked: a step on it would silently learn nothing."""


@dataclass
class CollectorState:
    """What later rollouts depend on; part of every checkpoint."""

    kl_coef: float
    normalizer: dict[str, float] = field(default_factory=dict)


@dataclass
class Collector:
    """Makes the Experience of a step."""

    generator: Generator
    scorer: Scorer
    policy: PolicyForward
    reference: Reference | None
    """None where nothing needs KL."""
    decode: Decode
    algorithm: AlgorithmConfig
    engine: EngineConfig
    device: torch.device
    max_length: int
    temperature: float
    """Of generation's config."""
    run_seed: int
    ranks: Ranks
    """Each generates a part of the samples with an engine of its own; all have the whole Experience."""

    def __post_init__(self) -> None:
        algorithm = self.algorithm
        self._kl: FixedKLController | AdaptiveKLController = FixedKLController(algorithm.initial_policy_kl_penalty)
        if algorithm.kl_target:
            self._kl = AdaptiveKLController(
                algorithm.initial_policy_kl_penalty,
                algorithm.kl_target,
                algorithm.kl_horizon,
                algorithm.kl_min_multiplier,
            )
        self._normalizer = RunningNormalizer()

    @property
    def state(self) -> CollectorState:
        return CollectorState(self._kl.coef, self._normalizer.state_dict())

    @state.setter
    def state(self, state: CollectorState) -> None:
        if self.algorithm.kl_target:  # else the config's, which may have been changed
            self._kl.coef = state.kl_coef
        if state.normalizer:
            self._normalizer.load_state_dict(state.normalizer)

    @property
    def kl_coef(self) -> float:
        return self._kl.coef

    def collect(self, take: Callable[[int], list[Prompt]], *, step: int, timers: Timers) -> Experience:
        """Steps 1 to 4 of a PPO step; scoring overlaps decoding and the log-probabilities.

        Args:
            take: hands out the next n training prompts.

        Raises:
            NothingToLearnError: no sample has an action to learn from.
        """
        rollouts, pending, counts = self._rollouts(take, step, timers)
        lengths = [len(rollout.tokens) for rollout in rollouts]
        tokens = torch.cat([rollout.tokens for rollout in rollouts])
        actions = action_mask(rollouts)
        mask = self._mask(rollouts, lengths, actions)
        temperatures = self._temperatures(rollouts)
        logprobs = torch.cat([action_aligned(rollout.sampler_logprobs) for rollout in rollouts]) * actions
        sampler_logprobs = None
        if self.algorithm.old_logprobs == "trainer":
            sampler_logprobs = logprobs
            logprobs = batch_logprobs(
                self.policy, tokens, lengths, actions, self.engine, self.device, self.ranks, temperatures
            )
        timers.lap("logprobs")
        kl, ref_logprobs = torch.zeros_like(logprobs), None
        if self.reference is not None:
            ref_logprobs = self.reference.logprobs(tokens, lengths, actions, temperatures)
            kl = kl_estimate(logprobs, ref_logprobs, kind=self.algorithm.kl_estimator)
        timers.lap("reference_logprobs")
        scores = self._scores(pending)
        timers.lap("wait_for_scores")
        experience = Experience(
            rollouts=rollouts,
            lengths=lengths,
            temperatures=temperatures,
            tokens=tokens,
            mask=mask,
            sampler_logprobs=sampler_logprobs,
            logprobs=logprobs,
            ref_logprobs=ref_logprobs,
            scores=scores.rewards,
            failed=scores.failures,
            extra=scores.extra,
            values=scores.values,
            kl=kl,
            kl_coef=self._kl.coef,
            counts=counts,
        )
        self._learn_from(experience)
        if step > self.algorithm.critic_warmup_steps:  # until then the policy is the reference, its KL says nothing
            self._kl.update(float(masked_mean(experience.kl, experience.mask)), len(rollouts))
        return experience

    def sample(self, prompts: Sequence[Prompt], *, samples_per_prompt: int, run_seed: int) -> Sampled:
        """Generate and score only: validation."""
        rollouts, pending = self._generate(
            self._requests(prompts, 0, samples_per_prompt, run_seed, Counter()), {p.prompt_id: p for p in prompts}
        )
        return Sampled(rollouts, self._scores(pending))

    def close(self) -> None:
        self.scorer.close()

    # --- rollouts -----------------------------------------------------------------------------------------------------

    def _rollouts(
        self, take: Callable[[int], list[Prompt]], step: int, timers: Timers
    ) -> tuple[list[Rollout], Pending, dict[str, float]]:
        """The step's samples and their scores to come; with a filter, after as many rollouts as it takes."""
        algorithm = self.algorithm
        wanted = algorithm.num_rollout_samples // algorithm.samples_per_prompt
        seen: Counter[int] = Counter()
        kept: list[Sampled] = []
        found = dropped = rounds = 0
        while found < wanted and rounds < algorithm.filter.max_rounds:
            rounds += 1
            prompts = take(wanted if rounds == 1 else max(1, wanted - found))
            requests = self._requests(prompts, step, algorithm.samples_per_prompt, self.run_seed, seen)
            rollouts, pending = self._generate(requests, {prompt.prompt_id: prompt for prompt in prompts})
            timers.lap("generate")
            if not algorithm.filter.enabled:
                return rollouts, pending, {}
            sampled = Sampled(rollouts, self._scores(pending))
            timers.lap("wait_for_scores")
            rows = self._rows_that_teach(sampled)
            if rows:
                kept.append(sampled.select(rows))
            found += len(rows) // algorithm.samples_per_prompt
            dropped += len(prompts) - len(rows) // algorithm.samples_per_prompt
        if found == 0:
            raise NothingToLearnError(
                f"algorithm.filter dropped all {dropped} prompts of {rounds} rollouts: widen algorithm.filter.low and high, "
                "or raise max_rounds"
            )
        scores: Future[Scores] = Future()
        scores.set_result(joined([part.scores for part in kept]))
        counts = {"filtered_prompts": float(dropped), "rounds": float(rounds)}
        return [rollout for part in kept for rollout in part.rollouts], {0: scores}, counts

    def _rows_that_teach(self, sampled: Sampled) -> list[int]:
        """Rows of the prompts whose mean filtering score lies strictly between the bounds."""
        bounds, size = self.algorithm.filter, self.algorithm.samples_per_prompt
        scores = sampled.scores.rewards if sampled.scores.filter_scores is None else sampled.scores.filter_scores
        # Comparing a tensor rounds the bounds to fp32, as the scores were: as Python's floats 2 of 10 would be above 0.2.
        means = scores.double().view(-1, size).nanmean(-1).float()  # NaN, which goes, where all samples failed
        low = -torch.inf if bounds.low is None else bounds.low
        high = torch.inf if bounds.high is None else bounds.high
        teach = (low < means) & (means < high)
        return teach.repeat_interleave(size).nonzero().flatten().tolist()

    def _requests(
        self, prompts: Sequence[Prompt], step: int, samples_per_prompt: int, run_seed: int, seen: Counter[int]
    ) -> list[GenerationRequest]:
        return make_requests(
            prompts,
            step=step,
            samples_per_prompt=samples_per_prompt,
            max_tokens=self.max_length,
            run_seed=run_seed,
            seen=seen,
        )

    def _generate(
        self, requests: Sequence[GenerationRequest], prompts: dict[int, Prompt]
    ) -> tuple[list[Rollout], Pending]:
        return generate_and_score(self.generator, self.scorer, requests, prompts, self.decode, self.ranks)

    def _scores(self, pending: Pending) -> Scores:
        """Of all groups, those that other ranks wait for, too."""
        shares = self.ranks.everyone(lambda: {group: scores.result() for group, scores in pending.items()})
        groups = {group: scores for share in shares for group, scores in share.items()}
        return joined([groups[group] for group in sorted(groups)])

    # --- what they teach ----------------------------------------------------------------------------------------------

    def _temperatures(self, rollouts: Sequence[Rollout]) -> Tensor | None:
        """[B], where a prompt has its own; the run's for the others."""
        if all(rollout.temperature is None for rollout in rollouts):
            return None
        return torch.tensor([rollout.temperature or self.temperature for rollout in rollouts])

    def _mask(self, rollouts: Sequence[Rollout], lengths: Sequence[int], actions: Tensor) -> Tensor:
        """The ``actions`` to learn from."""
        out = [self.algorithm.truncated_samples == "mask" and rollout.truncated for rollout in rollouts]
        mask = actions * (~torch.tensor(out)).float().repeat_interleave(torch.tensor(lengths))
        if not mask.any():
            raise NothingToLearnError(
                f"all {len(rollouts)} samples of this step were truncated and algorithm.truncated_samples=mask: "
                "nothing would be learned; raise generation.max_length or use keep, penalise or replace"
            )
        return mask

    @staticmethod
    def _require_finite_values(experience: Experience) -> None:
        """
        Raises:
            UserError: the critic has no number for a state whose action is learned from: both halves would learn NaN.
        """
        assert experience.values is not None
        wrong = experience.mask.bool() & ~experience.values.isfinite()
        if wrong.any():
            samples = sum(bool(part.any()) for part in wrong.split(experience.lengths))
            raise UserError(
                f"the critic's values of {samples} of {len(experience.lengths)} samples are not finite (the first is "
                f"{float(experience.values[wrong][0])}): lower the server's engine.optim.lr and go back to a checkpoint, or "
                "check the reward model it began with"
            )

    def _learn_from(self, experience: Experience) -> None:
        """Fill in rewards, advantages, returns and corrections."""
        algorithm, lengths = self.algorithm, experience.lengths
        scored = (~experience.failed).float().repeat_interleave(torch.tensor(lengths))
        experience.mask *= scored
        if not experience.mask.any():
            raise NothingToLearnError(
                f"every sample of this step was truncated or has no reward ({int(experience.failed.sum())} of "
                f"{len(lengths)} failed, reward.on_error=mask): nothing would be learned"
            )
        if algorithm.uses_critic:
            self._require_finite_values(experience)
        mask = pad(experience.mask, lengths)
        scores = shape_scores(
            experience.scores,
            experience.failed,
            torch.tensor([len(rollout.response_tokens) for rollout in experience.rollouts]),
            torch.tensor([rollout.truncated for rollout in experience.rollouts]),
            algorithm,
            max_length=torch.tensor([rollout.max_length for rollout in experience.rollouts]),
            normalizer=self._normalizer,
        )
        values = None if experience.values is None else pad(experience.values, lengths)
        compared = pad(action_mask(experience.rollouts) * scored, lengths)
        kl = pad(experience.kl, lengths)
        signal = estimate(scores, kl, values, compared, algorithm, kl_coef=self._kl.coef, learned=mask)
        experience.rewards = unpad(signal.rewards, lengths)
        experience.advantages = unpad(signal.advantages, lengths)
        if signal.equal_groups is not None:
            experience.counts["frac_reward_zero_std"] = signal.equal_groups
        experience.returns = None if signal.returns is None else unpad(signal.returns, lengths)
        correction = algorithm.correction
        if correction.kind != "none":
            assert experience.sampler_logprobs is not None  # PPOActorConfig
            trainer, sampler = pad(experience.logprobs, lengths), pad(experience.sampler_logprobs, lengths)
            weights = importance_weights(
                trainer, sampler, mask, kind=correction.kind, low=correction.low, high=correction.high
            )
            experience.correction = unpad(weights, lengths)
