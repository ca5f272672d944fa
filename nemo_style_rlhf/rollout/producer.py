"""The stateless part of a rollout: turns prompts into samples whose scores are pending."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, Generator, SampleId, Stream
from nemo_style_rlhf.generation.seeds import sample_seed
from nemo_style_rlhf.rollout.episodes import EpisodeRunner
from nemo_style_rlhf.rollout.outcomes import Counts, Outcome, with_episodes
from nemo_style_rlhf.rollout.prefetched import pack_rollouts, unpack_rollouts
from nemo_style_rlhf.rollout.types import Batch, Rollout, Sampled, episodes
from nemo_style_rlhf.schema.algorithm import AlgorithmConfig
from nemo_style_rlhf.schema.placement import GENERATE, SCORE
from nemo_style_rlhf.scoring.futures import InlineExecutor, gathered, mapped, resolved
from nemo_style_rlhf.scoring.interface import Message, Scorer, Scores, ScoringSample

log = logging.getLogger(__name__)
SCORING_GROUP = 32
"""Samples of a scoring request for each rank that answers it: small enough that scoring starts early, large enough that the
server's batches are full."""

Decode = Callable[[list[int], list[int]], str]
"""Decodes token ids of prompt and response to the response's text, without special tokens."""


class NothingToLearnError(UserError):
    """A whole rollout is masked: a step on it would silently learn nothing."""


class NothingLeftError(Exception):
    """The run has come to its end, before the last of its steps."""


class AllSolvedError(NothingLeftError):
    """Every prompt of a step's rollouts is above the filter's range: the policy has nothing left to learn from them."""


class DataTakenError(NothingLeftError):
    """With a filter, steps take more prompts than they train: algorithm.max_epochs passes over the prompts are over."""


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
    prompts: Sequence[Prompt], *, step: int, samples_per_prompt: int, max_tokens: int, run_seed: int,
    seen: Counter[int] | None = None,
) -> list[GenerationRequest]:  # fmt: skip
    """``samples_per_prompt`` requests for each prompt. If a prompt occurs again, its sample numbers continue from ``seen``."""
    seen = Counter() if seen is None else seen
    requests = []
    for prompt in prompts:
        token_ids, limit = tuple(prompt.token_ids), min(max_tokens, prompt.sampling.max_length or max_tokens)
        for _ in range(samples_per_prompt):
            sample = SampleId(step, prompt.prompt_id, seen[prompt.prompt_id])
            seen[prompt.prompt_id] += 1
            seed = sample_seed(run_seed, sample)
            requests.append(GenerationRequest(sample, token_ids, seed, limit, sampling=prompt.sampling))
    return requests


def scores_in_order(
    groups: "dict[int, Future[Scores]]", lengths: Sequence[int], ranks: Ranks, order: Sequence[int]
) -> "Future[Scores]":
    """The scores of a batch's samples in the order of their requests. If several ranks asked for them, all must ask for the
    result, at the same point.

    Args:
        groups: consecutive samples that this rank asked for, by group number.
        lengths: number of tokens of each sample of the batch.
        order: numbers of the samples in the order of ranks and groups.
    """
    own = gathered([groups[number] for number in sorted(groups)], list[Scores])
    places = {number: place for place, number in enumerate(order)}

    def joined(shards: Sequence[Sequence[Scores]]) -> Scores:
        scores = Scores.joined([group for shard in shards for group in shard])
        return scores.select([places[number] for number in range(len(order))], [lengths[number] for number in order])

    if ranks.size == 1:
        return mapped(own, lambda groups: joined([groups]))
    return InlineExecutor().submit(lambda: joined(ranks.everyone(own.result)))


@dataclass
class Producer:
    """Makes one batch per step, each a pure function of configuration, prompts, seed and weights."""

    generator: Generator
    scorer: Scorer
    take: Callable[[int, int], list[Prompt]]
    """Takes a position in the stream of training prompts and a number, and returns that many prompts from there."""
    decode: Decode
    algorithm: AlgorithmConfig
    max_length: int
    run_seed: int
    ranks: Ranks
    """Each tensor-parallel group shares a generator and makes a part of the samples; all ranks get the whole batch."""
    scoring_ranks: int = 1
    """Number of ranks that answer a scoring request."""
    episodes: EpisodeRunner | None = None
    """Makes samples of several turns with an environment; None for single responses."""
    most: int | None = None
    """Number of prompts that the run may take; None if the number of its steps is its only end."""
    on_first: bool = False
    """True if the first rank makes all samples: programs have one place to call."""
    turn: Callable[[str], None] = lambda phase: None
    """Called before generation and before scores are waited for, with the phase that begins."""
    clock_metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last batch's episodes that depend only on the clock."""

    def batch(self, step: int, position: int, version: int, timers: Timers) -> Batch:
        """The samples of step ``step``. A filter may need several rounds of generation.

        Args:
            position: number of prompts taken before this step.
            version: version of the weights to sample with.

        Raises:
            DataTakenError: the prompts that the run may take do not suffice.
            AllSolvedError: every prompt's filtering score is above the filter's range.
            NothingToLearnError: the filter dropped every prompt, and not all were above its range.
        """
        algorithm = self.algorithm
        wanted = algorithm.num_rollout_samples // algorithm.samples_per_prompt
        seen: Counter[int] = Counter()
        kept: list[Sampled] = []
        first_round = math.ceil(wanted * algorithm.filter.oversample)
        if self.most is not None and 0 < position > self.most - first_round:
            raise DataTakenError(
                f"{position} prompts were taken, as many steps of {first_round} as algorithm.max_epochs={algorithm.max_epochs} "
                "allows"
            )
        found = dropped = solved = rounds = 0
        counts: Counter[str] = Counter()
        while found < wanted and rounds < algorithm.filter.max_rounds:
            rounds += 1
            prompts = self.take(position, first_round if rounds == 1 else wanted - found)
            position += len(prompts)
            requests = make_requests(
                prompts, step=step, samples_per_prompt=algorithm.samples_per_prompt, max_tokens=self.max_length,
                run_seed=self.run_seed, seen=seen,
            )  # fmt: skip
            rollouts, pending, counted = self._generate(requests, prompts, version)
            counts.update(counted)
            timers.lap("generate")
            if not algorithm.filter.enabled:
                return Batch(step, rollouts, pending, position, dict(counts))
            self.turn(SCORE)
            sampled = Sampled(rollouts, pending.result())
            timers.lap("wait_for_scores")
            teaching, above = self._sides(sampled.scores)
            rows = teaching.repeat_interleave(algorithm.samples_per_prompt).nonzero().flatten().tolist()
            rows = rows[: (wanted - found) * algorithm.samples_per_prompt]
            solved += int(above.sum())
            if rows:
                kept.append(sampled.select(rows))
            found += len(rows) // algorithm.samples_per_prompt
            dropped += int((~teaching).sum())
        if found == 0:
            raise self._nothing_found(dropped, solved, rounds)
        rollouts = [rollout for part in kept for rollout in part.rollouts]
        scores = resolved(Scores.joined([part.scores for part in kept]))
        filtered = {"filtered_prompts": float(dropped), "rounds": float(rounds)}
        return Batch(step, rollouts, scores, position, {**counts, **filtered})

    def sample(self, prompts: Sequence[Prompt], *, samples_per_prompt: int, run_seed: int, version: int) -> Sampled:
        """Generate and score, for validation."""
        requests = make_requests(
            prompts, step=0, samples_per_prompt=samples_per_prompt, max_tokens=self.max_length, run_seed=run_seed
        )
        rollouts, pending, _ = self._generate(requests, prompts, version)
        self.turn(SCORE)
        return Sampled(rollouts, pending.result())

    def close(self) -> None:
        if self.episodes is not None:
            self.episodes.close()
        self.scorer.close()

    def _sides(self, scores: Scores) -> tuple[Tensor, Tensor]:
        """[P] bool each: the prompts whose mean filtering score lies strictly between the bounds, and the prompts above."""
        bounds, size = self.algorithm.filter, self.algorithm.samples_per_prompt
        looked_at = scores.rewards if scores.filter_scores is None else scores.filter_scores
        # Comparing with a tensor rounds the bounds to fp32, like the scores: as Python floats, 2 of 10 would be above 0.2.
        means = looked_at.double().view(-1, size).nanmean(-1).float()  # NaN, on no side, if all samples failed
        low = -torch.inf if bounds.low is None else bounds.low
        high = torch.inf if bounds.high is None else bounds.high
        return (low < means) & (means < high), means >= high

    def _nothing_found(self, dropped: int, solved: int, rounds: int) -> Exception:
        bounds = self.algorithm.filter
        if solved == dropped:
            return AllSolvedError(
                f"all {dropped} prompts of {rounds} rollouts reach algorithm.filter.high={bounds.high:g}"
            )
        remedies = [
            *([f"lower algorithm.filter.low={bounds.low:g}"] if bounds.low is not None else []),
            *([f"raise algorithm.filter.high={bounds.high:g}"] if solved and bounds.high is not None else []),
            f"raise algorithm.filter.max_rounds={bounds.max_rounds}, or give prompts that are solved sometimes",
        ]
        return NothingToLearnError(
            f"algorithm.filter dropped all {dropped} prompts of {rounds} rollouts, {solved} of them since they are above it, the "
            f"others below it or failed: {', '.join(remedies)}"
        )

    def _generate(
        self, requests: Sequence[GenerationRequest], prompts: Sequence[Prompt], version: int
    ) -> "tuple[list[Rollout], Future[Scores], dict[str, float]]":
        """Generate every request; scoring of a group of consecutive samples starts as soon as the group is complete.

        Requests are dealt to the generators in turn, which spreads the similar samples of a prompt; groups are cut by
        position. Neither depends on which sample finishes first, so all batches are the same in every run. If a generator has
        too few samples to keep every rank of the scorer busy, the first rank scores groups of all samples in the end.

        Returns:
            Rollouts of all ranks in the order of ``requests``, their pending scores, and counts of their episodes.
        """
        self.turn(GENERATE)
        ranks, by_id = self.ranks, {prompt.prompt_id: prompt for prompt in prompts}
        own = [requests[number] for number in self._dealt(len(requests))[ranks.generator]]
        stream = self.generator.stream(version)
        if self.episodes is not None:
            return self._run_episodes(requests, own, by_id, stream)
        places = {request.sample: place for place, request in enumerate(own)}
        rollouts: dict[int, Rollout] = {}
        together = self.scoring_ranks > 1 and len(requests) < ranks.generators * self._scoring_group
        groups = self._groups(0 if together else len(own), rollouts)
        stream.submit(own)
        for completion in stream.completed():
            if not ranks.leads:
                continue
            place = places[completion.request.sample]
            rollouts[place] = Rollout.from_completion(completion, by_id[completion.request.sample.prompt_id])
            if not together:
                groups.add(place)
        whole = gather_rollouts(ranks, list(rollouts.values()), requests, by_id)
        if together and ranks.is_first:
            groups = self._groups(len(whole), dict(enumerate(whole)))
            for place in range(len(whole)):
                groups.add(place)
        order = list(range(len(whole))) if together else flat(self._dealt(len(whole)))
        lengths = [len(rollout.tokens) for rollout in whole]
        return whole, scores_in_order(groups.scores, lengths, ranks, order), {}

    def _dealt(self, samples: int) -> Sequence[Sequence[int]]:
        """The numbers below ``samples`` that each generator makes."""
        if self.on_first:
            return [range(samples), *[range(0)] * (self.ranks.generators - 1)]
        return self.ranks.deal(samples)

    @property
    def _scoring_group(self) -> int:
        return SCORING_GROUP * self.scoring_ranks

    def _groups(self, samples: int, rollouts: dict[int, Rollout]) -> "ScoringGroups":
        """Groups of ``samples`` whose ``rollouts``, by place, will be there when they are complete."""

        def score(rows: range) -> "Future[Scores]":
            return self.scorer.score([scoring_sample([rollouts[row]], self.decode) for row in rows])

        return ScoringGroups(samples, self._scoring_group, score)

    def _run_episodes(
        self, requests: Sequence[GenerationRequest], own: Sequence[GenerationRequest], by_id: dict[int, Prompt], stream: Stream
    ) -> "tuple[list[Rollout], Future[Scores], dict[str, float]]":  # fmt: skip
        """:meth:`_generate`, for samples of several turns."""
        assert self.episodes is not None
        outcomes: dict[int, Outcome] = {}

        def score(rows: range) -> "Future[Scores]":
            group = [outcomes[row] for row in rows]
            asked = [scoring_sample(each.scored, self.decode) for each in group if not each.failed]
            return with_episodes(group, self.scorer.score(asked) if asked else None)

        groups = ScoringGroups(len(own), self._scoring_group, score)

        def finished(place: int, outcome: Outcome) -> None:
            outcomes[place] = outcome
            groups.add(place)

        prompts = [by_id[request.sample.prompt_id] for request in own]
        counts = Counts.summed(self.ranks.all_gather(self.episodes.run(own, prompts, stream, finished)))
        if counts.reasons and self.ranks.is_first:
            log.warning(
                "%d attempts at episodes failed, and %d episodes for good: %s", len(counts.reasons), counts.failed,
                counts.reasons[0],
            )  # fmt: skip
        self.clock_metrics = counts.of_clock
        made = [rollout for place in sorted(outcomes) for rollout in outcomes[place].rollouts]
        whole = gather_episodes(self.ranks, made, requests, by_id)
        lengths = [sum(len(rollout.tokens) for rollout in branches) for branches in episodes(whole)]
        order = flat(self._dealt(len(lengths)))
        return whole, scores_in_order(groups.scores, lengths, self.ranks, order), counts.of_episodes


class ScoringGroups:
    """Starts to score groups of consecutive samples as soon as they are complete."""

    def __init__(self, samples: int, largest: int, score: "Callable[[range], Future[Scores]]") -> None:
        """Form as few groups as possible, of at most ``largest`` samples and of about one size."""
        self.scores: dict[int, Future[Scores]] = {}
        """Pending scores by group number."""
        self._samples, self._score = samples, score
        self._size = -(-samples // max(1, -(-samples // largest)))
        self._missing = Counter(place // self._size for place in range(samples))

    def add(self, place: int) -> None:
        """Record that a sample has finished."""
        group = place // self._size
        self._missing[group] -= 1
        if not self._missing[group]:
            rows = range(group * self._size, min((group + 1) * self._size, self._samples))
            self.scores[group] = self._score(rows)


def flat(dealt: Sequence[Sequence[int]]) -> list[int]:
    return [number for own in dealt for number in own]


def gather_rollouts(
    ranks: Ranks, own: Sequence[Rollout], requests: Sequence[GenerationRequest], prompts: dict[int, Prompt]
) -> list[Rollout]:
    """The rollouts of all ranks in the order of ``requests``; data that every rank knows from the requests is not sent."""
    if ranks.size == 1:
        whole = {rollout.sample: rollout for rollout in own}
        return [whole[request.sample] for request in requests]
    empty = [torch.empty(0, dtype=torch.int64)], [torch.empty(0)]
    tokens = ranks.all_gather_flat(torch.cat([rollout.response_tokens for rollout in own] or empty[0]))
    logprobs = ranks.all_gather_flat(
        torch.cat([rollout.sampler_logprobs[rollout.response_mask] for rollout in own] or empty[1])
    )
    described = ranks.all_gather(
        [(r.sample, r.response_length, r.finish_reason, int(r.weights_version[-1])) for r in own]
    )
    by_sample = {request.sample: request for request in requests}
    rollouts: dict[SampleId, Rollout] = {}
    for shard, ids, of_sampler in zip(described, tokens, logprobs, strict=True):
        lengths = [length for _, length, _, _ in shard]
        parts = zip(shard, ids.split(lengths), of_sampler.split(lengths), strict=True)
        for (sample, _, reason, version), token_ids, logprob in parts:
            completion = Completion(by_sample[sample], token_ids, logprob, reason, version)
            rollouts[sample] = Rollout.from_completion(completion, prompts[sample.prompt_id])
    return [rollouts[request.sample] for request in requests]


def gather_episodes(
    ranks: Ranks, own: Sequence[Rollout], requests: Sequence[GenerationRequest], prompts: dict[int, Prompt]
) -> list[Rollout]:
    """The rollouts of all ranks in the order of ``requests``, the branches of each episode in theirs."""
    shards = [own] if ranks.size == 1 else [unpack_rollouts(p, prompts) for p in ranks.all_gather(pack_rollouts(own))]
    by_sample: dict[SampleId, list[Rollout]] = {}
    for rollout in (rollout for shard in shards for rollout in shard):
        by_sample.setdefault(rollout.sample, []).append(rollout)
    return [rollout for request in requests for rollout in by_sample[request.sample]]


def scoring_sample(branches: Sequence[Rollout], decode: Decode) -> ScoringSample:
    """The sample for sources to score: the tokens of the last branch, and the text of all branches."""
    last = branches[-1]

    def messages() -> list[Message]:
        read = [Message("prompt", branches[0].prompt_text)]
        for rollout in branches:
            tokens, end = rollout.tokens.tolist(), rollout.prompt_length
            if rollout is not branches[0] and rollout.observed:
                read.append(Message("environment", rollout.observed))
            for turn in rollout.turns:
                if turn.start > end:
                    read.append(Message("environment", decode(tokens[:end], tokens[end : turn.start])))
                read.append(Message("response", decode(tokens[: turn.start], tokens[turn.start : turn.end])))
                end = turn.end
        return read

    prompt = last.prompt
    return ScoringSample(last.tokens, prompt.label, messages, prompt.metadata, branches[0].chat)
