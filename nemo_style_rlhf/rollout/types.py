"""Data types of a rollout: a sample, the samples of a step, and a batch ready to train on."""

from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.generation.interface import Completion, SampleId
from nemo_style_rlhf.schema.chat import Chat
from nemo_style_rlhf.scoring.interface import Scores


@dataclass(frozen=True)
class Turn:
    """A stretch of tokens that the policy produced without interruption."""

    start: int
    """Position of its first token in the sequence."""
    end: int
    """Position after its last token."""
    finish_reason: str
    """``stop`` or ``length``."""
    reward: float = 0.0
    """The environment's reward for this turn."""


@dataclass
class Rollout:
    """One sample: a prompt and the policy's response. L is the length of the whole sequence in tokens.

    An episode whose conversation was begun again, or continued in several ways, has a rollout for each branch, one after the
    other. A token is learned in one of them, and is in the others as if the environment had written it.
    """

    sample: SampleId
    seed: int
    prompt: Prompt
    tokens: Tensor
    """[L] int64: prompt and response."""
    response_mask: Tensor
    """[L] bool: True on tokens that the policy produced; False on the prompt and on text that an environment inserted."""
    sampler_logprobs: Tensor
    """[L] float32, nats: log-probability of each response token when it was sampled; 0 elsewhere."""
    weights_version: Tensor
    """[L] int64: version of the policy that produced each response token; -1 elsewhere."""
    turns: tuple[Turn, ...]
    max_length: int
    """Limit on response tokens: generation.max_length, or the prompt's own."""
    status: str = "completed"
    """The episode's status: ``completed``; ``truncated``, for lack of room or turns; or ``failed``, with nothing to learn."""
    branch: int = 0
    """Number among the rollouts of the episode, from 0."""
    began_with: str | None = None
    """The text with which the environment began the episode, or that a program asked first, if it differs from ``prompt``'s."""
    asked: Chat | None = None
    """The conversation that ``began_with`` renders, if it is one."""
    observed: str | None = None
    """The environment's words before this branch, if it is a later branch of an environment's episode."""

    @property
    def finish_reason(self) -> str:
        """``stop``, ``length`` or ``failed``."""
        return {"completed": "stop", "truncated": "length"}.get(self.status, self.status)

    @property
    def truncated(self) -> bool:
        return self.status == "truncated"

    @property
    def prompt_text(self) -> str:
        return self.prompt.text if self.began_with is None else self.began_with

    @property
    def chat(self) -> Chat | None:
        """The conversation that ``prompt_text`` renders; None for a text."""
        return self.prompt.chat if self.began_with is None else self.asked

    @property
    def prompt_length(self) -> int:
        """Tokens before the first turn."""
        return self.turns[0].start if self.turns else len(self.tokens)

    @property
    def response_tokens(self) -> Tensor:
        """int64 [response_length], the tokens that the policy produced."""
        parts = [self.tokens[turn.start : turn.end] for turn in self.turns]
        return parts[0] if len(parts) == 1 else torch.cat([*parts, self.tokens[:0]])

    @property
    def response_length(self) -> int:
        return sum(turn.end - turn.start for turn in self.turns)

    @staticmethod
    def from_completion(completion: Completion, prompt: Prompt) -> "Rollout":
        """A rollout of one turn: the policy produced everything after the prompt."""
        request = completion.request
        start, end = len(request.prompt), len(request.prompt) + len(completion.token_ids)
        # An array, since torch reads a list ten times slower.
        prompt_ids = torch.frombuffer(array("q", request.prompt), dtype=torch.int64)
        logprobs = torch.zeros(end)
        logprobs[start:] = completion.logprobs
        weights_version = torch.full((end,), -1)
        weights_version[start:] = completion.weights_version
        return Rollout(
            sample=request.sample,
            seed=request.seed,
            prompt=prompt,
            tokens=torch.cat((prompt_ids, completion.token_ids)),
            response_mask=torch.arange(end) >= start,
            sampler_logprobs=logprobs,
            weights_version=weights_version,
            turns=(Turn(start, end, completion.finish_reason),),
            max_length=request.max_tokens,
            status="truncated" if completion.finish_reason == "length" else "completed",
        )


def branch_counts(rollouts: Sequence[Rollout]) -> list[int]:
    """Number of the consecutive rollouts of each episode."""
    begins = [number for number, rollout in enumerate(rollouts) if rollout.branch == 0]
    return [end - begin for begin, end in zip(begins, [*begins[1:], len(rollouts)])]


def sums(numbers: Sequence[int], counts: Sequence[int]) -> list[int]:
    """The sums of consecutive ``numbers``, ``counts`` of them each."""
    ends = [0, *accumulate(counts)]
    return [sum(numbers[begin:end]) for begin, end in pairwise(ends)]


def episodes(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """The branches of each episode."""
    counts = branch_counts(rollouts)
    return [list(rollouts[end - count : end]) for count, end in zip(counts, accumulate(counts))]


@dataclass
class Sampled:
    """Samples in the order of their requests, with all branches of an episode, and a score for each."""

    rollouts: list[Rollout]
    scores: Scores

    def select(self, rows: list[int]) -> "Sampled":
        """The episodes ``rows``."""
        every = episodes(self.rollouts)
        lengths = [sum(len(rollout.tokens) for rollout in branches) for branches in every]
        return Sampled([rollout for row in rows for rollout in every[row]], self.scores.select(rows, lengths))


@dataclass
class Batch:
    """All that a step needs from outside the trainer."""

    step: int
    rollouts: list[Rollout]
    """``samples_per_prompt`` consecutive samples for each prompt, with all branches of an episode."""
    scores: "Future[Scores]"
    """The scores of all samples; it carries a source's error on any rank. All ranks ask for the result, at the same point."""
    data_end: int
    """Number of prompts taken from the sampler, including this batch's."""
    counts: dict[str, float]
    """Counts of episodes, and of filtering: prompts filtered out and rounds needed."""
    probe_gap: float = 0.0
    """The gap, in nats, that the generator found on the probe when it loaded the weights that sampled this."""


@dataclass(frozen=True)
class Experience:
    """A batch of B rollouts of E episodes laid end to end, N tokens in all, aligned to actions. Without branches, E is B.

    Entry t of a sequence is the state after tokens 0..t, whose action is token t+1; its last entry has no action.
    Per-token tensors are [N] float32 and undefined where ``mask`` is 0.
    """

    rollouts: list[Rollout]
    lengths: list[int]
    """[B] tokens per sequence."""
    temperatures: Tensor | None
    """[B] float32; None if no prompt has its own."""
    tokens: Tensor
    """[N] int64."""
    mask: Tensor
    """1 where the action is a loss token. Samples masked for being truncated are 0 here, but still count in their group."""
    sampler_logprobs: Tensor | None
    """Nats, as reported by the generator; None if ``logprobs`` are already the sampler's."""
    logprobs: Tensor
    """Nats, under the policy before its update (PPO's "old" policy)."""
    ref_logprobs: Tensor | None
    """Nats, under the frozen reference; None if no KL term is used."""
    scores: Scores
    """Scores [E] of the whole episodes, as their sources gave them, and the critic's values [N] before its update."""
    kl: Tensor
    """Per-token estimate of KL(policy || reference), nats; 0 without a reference."""
    kl_coef: float
    """Coefficient of this step's KL term."""
    rewards: Tensor
    """Per token: the KL penalty if it is part of the reward, and the shaped score at the last action."""
    advantages: Tensor
    returns: Tensor | None
    """Training targets of the critic: advantages before whitening, plus values; None without a critic."""
    correction: Tensor | None
    """Importance weights trainer / sampler on the policy loss; None without a correction."""
    counts: dict[str, float]
    """As in :class:`Batch`, and the share of groups whose scores are all equal."""
    stale: bool = False
    """True if an older policy than the one before the update has sampled."""

    @property
    def under_the_sampler(self) -> Tensor:
        """Log-probabilities in nats under the policy that has sampled: of stale samples the generator's, else ``logprobs``."""
        return self.sampler_logprobs if self.stale and self.sampler_logprobs is not None else self.logprobs

    @cached_property
    def branches(self) -> list[int]:
        """[E] rollouts per episode."""
        return branch_counts(self.rollouts)

    @property
    def present_kl(self) -> Tensor:
        """``kl``, weighted so that its mean holds for the policy before the update, even if an older one has sampled."""
        return self.kl * self.correction if self.stale and self.correction is not None else self.kl
