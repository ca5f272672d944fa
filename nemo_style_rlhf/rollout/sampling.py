"""From prompts to finished samples whose scores are on their way."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter

import torch
from torch import Tensor

from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.data.ranks import Ranks
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, Generator, SampleId, sample_seed
from nemo_style_rlhf.rollout.types import Rollout
from nemo_style_rlhf.scoring.interface import Scorer, Scores, ScoringSample

SCORING_GROUP = 32
"""Samples per scoring request: small enough that scoring starts early, large enough that the server's batches are full."""

RUNNING_PART = 4
"""Of several ranks each decodes a quarter of its share at a time: less would even out their tokens still better, in smaller
batches."""

MOST_OF_A_SHARE = 1.05
"""A rank that is ahead leaves the rest to the others once it has so much of its share of the tokens, as far as can be told."""

Pending = dict[int, Future[Scores]]
"""Scores to come, of the groups that were completed on this rank."""
Decode = Callable[[list[int], list[int]], str]
"""Token ids of prompt and response to the response's text, without special tokens."""


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
    seen: Counter[int] | None = None,
) -> list[GenerationRequest]:
    """``samples_per_prompt`` requests for each prompt; a prompt that occurs again counts its samples on, in ``seen``."""
    seen = Counter() if seen is None else seen
    requests = []
    for prompt in prompts:
        for _ in range(samples_per_prompt):
            sample = SampleId(step, prompt.prompt_id, seen[prompt.prompt_id])
            seen[prompt.prompt_id] += 1
            limit = min(max_tokens, prompt.sampling.max_length or max_tokens)
            requests.append(
                GenerationRequest(
                    sample, tuple(prompt.token_ids), sample_seed(run_seed, sample), limit, sampling=prompt.sampling
                )
            )
    return requests


@dataclass
class Sampled:
    """Samples in the order of their requests, and what a scorer says of them."""

    rollouts: list[Rollout]
    scores: Scores

    def select(self, rows: Sequence[int]) -> "Sampled":
        values = self.scores.values
        if values is not None:
            parts = values.split([len(rollout.tokens) for rollout in self.rollouts])
            values = torch.cat([parts[row] for row in rows])
        picked = torch.tensor(list(rows), dtype=torch.long)
        filter_scores = self.scores.filter_scores
        return Sampled(
            [self.rollouts[row] for row in rows],
            Scores(
                rewards=self.scores.rewards[picked],
                filter_scores=None if filter_scores is None else filter_scores[picked],
                values=values,
                extra={name: value[picked] for name, value in self.scores.extra.items()},
                failed=self.scores.failures[picked],
            ),
        )


def generate_and_score(
    generator: Generator,
    scorer: Scorer,
    requests: Sequence[GenerationRequest],
    prompts: dict[int, Prompt],
    decode: Decode,
    ranks: Ranks,
) -> tuple[list[Rollout], Pending]:
    """Generate every request; a group of neighbours is sent to be scored as soon as it is complete.

    Groups are cut by position in ``requests``, never by who finished first, so the scorer's batches are repeatable. Several
    ranks are dealt the first requests in turn, so that the samples of a prompt are spread; the rest go one by one to whoever
    has room and is not ahead in tokens. Of ranks that share a generator the leader decides, and keeps what comes of it.

    Returns:
        Rollouts of all ranks in the order of ``requests``, and the scores to come of the groups completed on this rank.
    """
    room = len(requests) if ranks.teams == 1 else max(1, len(requests) // (RUNNING_PART * ranks.teams))
    numbers = {request.sample: number for number, request in enumerate(requests)}
    groups = ranks.groups(
        [min(SCORING_GROUP, len(requests) - start) for start in range(0, len(requests), SCORING_GROUP)]
    )
    queue = ranks.queue(len(requests), dealt=room * ranks.teams)
    share = _TokenShare(ranks, len(requests))
    rollouts: dict[int, Rollout] = {}
    pending: Pending = {}
    running = 0

    def take_more() -> None:
        nonlocal running
        wanted = min(room, max(share.room, 1)) - running  # a rank that has nothing to do takes one in any case
        if taken := ranks.from_leader(lambda: list(islice(queue, max(0, wanted)))):
            running += len(taken)
            generator.submit([requests[number] for number in taken])

    def keep(completion: Completion) -> None:
        number = numbers[completion.request.sample]
        prompt = prompts[completion.request.sample.prompt_id]
        rollouts[number] = Rollout.from_completion(completion, prompt.text, prompt.label, prompt.metadata)
        share.add(len(completion.token_ids))
        group, row = divmod(number, SCORING_GROUP)
        if whole := groups.add(group, row, rollouts[number]):
            pending[group] = scorer.score([_scoring_sample(rollout, decode) for rollout in whole])

    take_more()
    while running:
        for completion in generator.completed():
            running -= 1
            if ranks.leads:
                keep(completion)
            take_more()
    everyones = {number: rollout for share in ranks.all_gather(rollouts) for number, rollout in share.items()}
    return [everyones[number] for number in sorted(everyones)], pending


class _TokenShare:
    """How much more of a rollout this rank may take on."""

    def __init__(self, ranks: Ranks, samples: int) -> None:
        self._most = MOST_OF_A_SHARE * samples / ranks.teams if ranks.teams > 1 else samples
        self._tokens, self._finished = ranks.tally(), ranks.tally()
        self._own = 0
        self.room = samples
        """Samples of mean length that still fit into its share: those it has running, and further ones."""

    def add(self, tokens: int) -> None:
        """Of a finished sample."""
        self._own += tokens
        mean = self._tokens.add(tokens) / self._finished.add(1)
        self.room = int(self._most - self._own / mean)


def joined(groups: Sequence[Scores]) -> Scores:
    """Neighbouring groups as one; a metric that only some groups have is NaN in the others."""

    def together(parts: "list[Tensor | None]") -> Tensor | None:
        present = [part for part in parts if part is not None]
        return torch.cat(present) if len(present) == len(parts) else None

    names = sorted({name for group in groups for name in group.extra})
    with_filter = any(group.filter_scores is not None for group in groups)
    return Scores(
        rewards=torch.cat([group.rewards for group in groups]),
        filter_scores=torch.cat([g.rewards if g.filter_scores is None else g.filter_scores for g in groups])
        if with_filter
        else None,
        values=together([group.values for group in groups]),
        extra={
            name: torch.cat([g.extra.get(name, torch.full_like(g.rewards, torch.nan)) for g in groups])
            for name in names
        },
        failed=torch.cat([group.failures for group in groups]),
    )


def _scoring_sample(rollout: Rollout, decode: Decode) -> ScoringSample:
    response = decode(rollout.tokens[~rollout.response_mask].tolist(), rollout.response_tokens)
    return ScoringSample(rollout.tokens, rollout.prompt_text, response, rollout.label)
