"""The stateful part of a rollout: turns a batch of scored samples into the training signal of each token."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nemo_style_rlhf.algorithms.corrections import importance_weights
from nemo_style_rlhf.algorithms.kl import AdaptiveKLController, FixedKLController, kl_estimate
from nemo_style_rlhf.algorithms.masking import masked_mean
from nemo_style_rlhf.algorithms.reward_shaping import RunningNormalizer
from nemo_style_rlhf.data.ragged import pad, unpad
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.rollout.logprobs import PolicyForward, action_aligned, action_mask, batch_logprobs
from nemo_style_rlhf.rollout.producer import NothingToLearnError, Timers
from nemo_style_rlhf.rollout.reference import Reference
from nemo_style_rlhf.rollout.training_signal import Shaped, Signal, estimate, shape_scores
from nemo_style_rlhf.rollout.types import Batch, Experience, Rollout, branch_counts, episodes, sums
from nemo_style_rlhf.schema.algorithm import AlgorithmConfig
from nemo_style_rlhf.schema.common import EngineConfig
from nemo_style_rlhf.scoring.interface import Scores


@dataclass
class ShapingState:
    """State that later batches depend on. Saved in every checkpoint."""

    kl_coef: float
    normalizer: dict[str, float] = field(default_factory=dict)


@dataclass
class ExperienceBuilder:
    """Turns a :class:`Batch` into an :class:`Experience`, in the order of the steps."""

    policy: PolicyForward
    reference: Reference | None
    """None if no KL term is used."""
    algorithm: AlgorithmConfig
    engine: EngineConfig
    device: torch.device
    temperature: float
    """Default temperature, from ``generation.temperature``."""
    ranks: Ranks
    """Ranks that share the forwards; each gets the whole Experience."""
    ask_values: "Callable[[Sequence[Tensor], int], Future[Scores]] | None" = None
    """Asks the critic of a given step for the values of sequences, if the scores bring none."""

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
    def state(self) -> ShapingState:
        return ShapingState(self._kl.coef, self._normalizer.state_dict())

    @state.setter
    def state(self, state: ShapingState) -> None:
        if self.algorithm.kl_target:  # without a target, the config's coefficient holds: the user may have changed it
            self._kl.coef = state.kl_coef
        if state.normalizer:
            self._normalizer.load_state_dict(state.normalizer)

    def build(self, batch: Batch, timers: Timers, *, critic_step: int = 0) -> Experience:
        """Compute log-probabilities, KL, advantages and corrections of a batch, whose scores may still be pending.

        Args:
            critic_step: number of train steps that the critic has done.

        Raises:
            NothingToLearnError: no sample has a loss token.
            UserError: the critic's values are not finite, or come from more than one of its steps.
        """
        algorithm, rollouts = self.algorithm, batch.rollouts
        lengths = [len(rollout.tokens) for rollout in rollouts]
        tokens = torch.cat([rollout.tokens for rollout in rollouts])
        actions = action_mask(rollouts)
        untruncated = self._without_truncated(rollouts, lengths, actions)
        late_values = None
        if self.ask_values is not None and self.ranks.is_first:
            late_values = self.ask_values([rollout.tokens for rollout in rollouts], critic_step)
        temperatures = self._temperatures(rollouts)
        logprobs = action_aligned([rollout.sampler_logprobs for rollout in rollouts]) * actions
        sampler_logprobs = None
        if algorithm.old_logprobs == "trainer":
            sampler_logprobs = logprobs
            logprobs = batch_logprobs(
                self.policy, tokens, lengths, actions, self.engine, self.device, self.ranks, temperatures
            )
        timers.lap("logprobs")
        kl, ref_logprobs = torch.zeros_like(logprobs), None
        if self.reference is not None:
            ref_logprobs = self.reference.logprobs(tokens, lengths, actions, temperatures)
            kl = kl_estimate(logprobs, ref_logprobs, kind=algorithm.kl_estimator)
        timers.lap("reference_logprobs")
        scores = batch.scores.result()
        if self.ask_values is not None:
            valued = self.ranks.on_first(lambda: late_values.result())  # type: ignore[union-attr]
            scores = replace(scores, values=valued.values, critic_steps=valued.critic_steps)
        timers.lap("wait_for_scores")
        branches = branch_counts(rollouts)
        of_episodes = sums(lengths, branches)
        scored = (~scores.failures).float().repeat_interleave(torch.tensor(of_episodes))
        mask = untruncated * scored
        if not mask.any():
            raise NothingToLearnError(
                f"every sample of this step was truncated, failed or has no reward ({int(scores.failures.sum())} of "
                f"{len(branches)} failed): nothing would be learned"
            )
        if algorithm.uses_critic:
            require_one_critic_step(scores.critic_steps)
            require_finite_values(scores.values, mask, lengths)
        signal = self._signal(rollouts, scores, kl, branches, of_episodes, compared=actions * scored, learned=mask)
        equal = {} if signal.equal_groups is None else {"frac_reward_zero_std": signal.equal_groups}
        experience = Experience(
            rollouts=rollouts,
            lengths=lengths,
            temperatures=temperatures,
            tokens=tokens,
            mask=mask,
            sampler_logprobs=sampler_logprobs,
            logprobs=logprobs,
            ref_logprobs=ref_logprobs,
            scores=scores,
            kl=kl,
            kl_coef=self._kl.coef,
            rewards=unpad(signal.rewards, of_episodes),
            advantages=unpad(signal.advantages, of_episodes),
            returns=None if signal.returns is None else unpad(signal.returns, of_episodes),
            correction=self._correction(logprobs, sampler_logprobs, mask, of_episodes),
            counts=batch.counts | equal,
            stale=algorithm.staleness > 0,
        )
        if batch.step > algorithm.critic_warmup_steps:  # until then the policy stands still, whatever its KL
            self._kl.update(float(masked_mean(experience.present_kl, mask)), len(branches))
        timers.lap("advantages")
        return experience

    def _temperatures(self, rollouts: Sequence[Rollout]) -> Tensor | None:
        """[B], the run's temperature for prompts without their own; None if no prompt has its own."""
        own = [rollout.prompt.sampling.temperature for rollout in rollouts]
        if all(temperature is None for temperature in own):
            return None
        return torch.tensor([temperature or self.temperature for temperature in own])

    def _without_truncated(self, rollouts: Sequence[Rollout], lengths: Sequence[int], actions: Tensor) -> Tensor:
        """``actions``, without those of truncated samples if the configuration masks these."""
        out = [self.algorithm.truncated_samples == "mask" and rollout.truncated for rollout in rollouts]
        if not any(out):
            return actions
        mask = actions * (~torch.tensor(out)).float().repeat_interleave(torch.tensor(lengths))
        if not mask.any():
            raise NothingToLearnError(
                f"all {len(rollouts)} samples of this step were truncated and algorithm.truncated_samples=mask: "
                "nothing would be learned; raise generation.max_length or use keep, penalise or replace"
            )
        return mask

    def _signal(
        self, rollouts: Sequence[Rollout], scores: Scores, kl: Tensor, branches: Sequence[int], lengths: Sequence[int], *,
        compared: Tensor, learned: Tensor,
    ) -> Signal:  # fmt: skip
        """The signal of whole episodes: the rollouts of one are taken as one sequence.

        Args:
            branches: [E] rollouts per episode.
            lengths: [E] tokens per episode.
        """
        first = [rollout for rollout in rollouts if rollout.branch == 0]
        shaped = shape_scores(
            scores.rewards,
            scores.failures,
            torch.tensor(sums([rollout.response_length for rollout in rollouts], branches)),
            torch.tensor([rollout.truncated for rollout in first]),
            self.algorithm,
            max_length=torch.tensor([rollout.max_length for rollout in first]),
            normalizer=self._normalizer,
        )
        values = None if scores.values is None else pad(scores.values, lengths)
        return estimate(
            shaped.scores, pad(kl, lengths), values, pad(compared, lengths), self.algorithm, kl_coef=self._kl.coef,
            learned=pad(learned, lengths), early=early_rewards(rollouts, lengths, shaped),
        )  # fmt: skip

    def _correction(
        self, trainer: Tensor, sampler: Tensor | None, mask: Tensor, lengths: Sequence[int]
    ) -> Tensor | None:
        correction = self.algorithm.correction
        if correction.kind == "none":
            return None
        assert sampler is not None  # PPOActorConfig
        padded = (pad(flat, lengths) for flat in (trainer, sampler, mask))
        weights = importance_weights(*padded, kind=correction.kind, low=correction.low, high=correction.high)
        return unpad(weights, lengths)


def early_rewards(rollouts: Sequence[Rollout], lengths: Sequence[int], shaped: Shaped) -> Tensor | None:
    """[E, T] float32: the shaped reward of the environment for each turn but the episode's last, at that turn's last action; None
    if all are 0. In an episode of several turns, the part that no turn earned stands at the first action: it then changes the
    return of the episode and of no later turn.

    Args:
        lengths: [E] tokens per episode.
    """
    scales, offsets = shaped.scale.tolist(), shaped.offset.tolist()
    rewarded, begin = list[tuple[int, float]](), 0
    for branches, scale, offset in zip(episodes(rollouts), scales, offsets, strict=True):
        turns = []
        for rollout in branches:
            turns += [(begin + turn.start - 1, begin + turn.end - 2, turn.reward) for turn in rollout.turns]
            begin += len(rollout.tokens)
        rewarded += [(last, scale * reward) for _, last, reward in turns[:-1]]
        rewarded += [(first, offset) for first, *_ in turns[:1] if len(turns) > 1]
    if not any(reward for _, reward in rewarded):
        return None
    places, rewards = zip(*rewarded)
    flat = torch.zeros(begin).index_put((torch.tensor(places),), torch.tensor(rewards), accumulate=True)
    return pad(flat, lengths)


def require_one_critic_step(steps: frozenset[int]) -> None:
    """Advantages compare values with each other, so all values of a rollout must be from one critic.

    They cannot differ while this run has the lease. Going back to a checkpoint, as after a lost server, would take the lease
    from the run that has it now, and that run would take it back: so this run ends, as it does when it finds its lease lost.

    Raises:
        UserError: the values of the rollout are from more than one of the critic's steps.
    """
    if len(steps) > 1:
        raise UserError(
            f"the critic's values of one rollout are from its steps {', '.join(map(str, sorted(steps)))}: another run trains or "
            "restores the same critic; this run learned nothing from them and its last checkpoint is whole: stop the other "
            "run and start this one again"
        )


def require_finite_values(values: Tensor | None, mask: Tensor, lengths: Sequence[int]) -> None:
    """Raise UserError if the critic's value at a loss token is not finite: both processes would learn NaN."""
    assert values is not None
    wrong = mask.bool() & ~values.isfinite()
    if wrong.any():
        samples = int(pad(wrong, lengths).any(-1).sum())
        raise UserError(
            f"the critic's values of {samples} of {len(lengths)} samples are not finite (the first is "
            f"{float(values[wrong][0])}): lower the server's engine.optim.lr and go back to a checkpoint, or "
            "check the reward model it began with"
        )
