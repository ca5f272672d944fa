"""Runs the episodes of a batch: between the environments, which observe, and a generator, which samples.

Episodes go on side by side, each at its own pace. Which one goes on when changes nothing about any of them: the seed of an answer
follows from the sample and from what the policy has read.
"""

import hashlib
import json
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from nemo_style_rlhf.agents.environment import Action, Observation, Task
from nemo_style_rlhf.agents.episode import Episode
from nemo_style_rlhf.agents.events import Asked, Called, Emit, Ended, EpisodeSource, Event, Failed
from nemo_style_rlhf.agents.rows import Row
from nemo_style_rlhf.data.encoding import Encoder, decode_response
from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.data.turns import said
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, Stream
from nemo_style_rlhf.rollout.types import Rollout, Turn
from nemo_style_rlhf.schema.agent import AgentConfig
from nemo_style_rlhf.schema.generation import SamplingOverrides
from nemo_style_rlhf.scoring.futures import mapped
from nemo_style_rlhf.scoring.interface import Scores


def request_seed(sample_seed: int, token_ids: Sequence[int]) -> int:
    key = json.dumps([sample_seed, [*token_ids], 0, ""]).encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:4], "big") >> 1


ReadMessage = Callable[[str, Sequence[int]], dict[str, Any]]
"""Makes the assistant's message of a response's text and token ids, with its tool calls."""


@dataclass
class Counts:
    """What happened to the episodes of a batch."""

    retried: int = 0
    """Attempts that failed, and were followed by another one."""
    failed: int = 0
    """Episodes that failed for good."""
    timed_out: int = 0
    """Attempts that the clock ended."""
    restarted: int = 0
    """Episodes that began again because another one took their worker with it. It is the only count that the clock decides."""
    seconds: float = 0.0
    """That environments took, summed over episodes."""
    reasons: list[str] = field(default_factory=list)
    """Why attempts failed."""

    @staticmethod
    def summed(parts: "Sequence[Counts]") -> "Counts":
        def total(name: str) -> Any:
            values = [getattr(part, name) for part in parts]
            return sum(values[1:], values[0])

        return Counts(**{each.name: total(each.name) for each in fields(Counts)})

    @property
    def of_episodes(self) -> dict[str, float]:
        return {
            "agent/retried_episodes": float(self.retried),
            "agent/failed_episodes": float(self.failed),
            "agent/timeouts": float(self.timed_out),
        }

    @property
    def of_clock(self) -> dict[str, float]:
        return {"agent/restarted_episodes": float(self.restarted), "agent/environment_seconds": self.seconds}


@dataclass
class Outcome:
    """A finished episode."""

    rollouts: list[Rollout]
    reward: float
    """Sum over its turns."""
    score: float | None
    metrics: dict[str, float]
    """Its number of turns, and those of its environment."""
    failed: bool = False


def with_episodes(outcomes: Sequence[Outcome], asked: "Future[Scores] | None") -> "Future[Scores]":
    """The scores of a group of episodes.

    Args:
        asked: of the reward sources, for those that have not failed; None if all have. They are added to the rewards of the
            environment.
    """
    scored: Future[Scores] = Future()
    if asked is None:
        scored.set_result(_joined(outcomes, None))
    return scored if asked is None else mapped(asked, lambda scores: _joined(outcomes, scores))


def _joined(outcomes: Sequence[Outcome], asked: Scores | None) -> Scores:
    alive = torch.tensor([not outcome.failed for outcome in outcomes])

    def spread(values: Tensor) -> Tensor:
        """Values of the living episodes [n], and NaN for the others."""
        return torch.full((len(outcomes),), torch.nan).masked_scatter(alive, values)

    rewards = torch.tensor([outcome.reward for outcome in outcomes], dtype=torch.float32)
    names = sorted({name for outcome in outcomes for name in outcome.metrics})
    extra = {name: torch.tensor([outcome.metrics.get(name, torch.nan) for outcome in outcomes]) for name in names}
    failed, filter_scores = ~alive, None
    if asked is not None:
        rewards = rewards + spread(asked.rewards)
        failed = failed | spread(asked.failures.float()).nan_to_num(1).bool()
        extra |= {name: spread(values) for name, values in asked.extra.items()}
        filter_scores = None if asked.filter_scores is None else spread(asked.filter_scores)
    if any(outcome.score is not None for outcome in outcomes):
        own = [
            reward if outcome.score is None else outcome.score for outcome, reward in zip(outcomes, rewards.tolist())
        ]
        filter_scores = torch.tensor(own).masked_fill(failed, torch.nan)
    return Scores(rewards.masked_fill(failed, torch.nan), filter_scores, extra=extra, failed=failed)


@dataclass
class _Running:
    request: GenerationRequest
    prompt: Prompt
    attempt: int = 1
    episode: Episode | None = None
    asked: Asked | None = None
    over: bool = False
    """Whether the environment was told to end, which it does with the observation that is already noted."""
    truncated: bool = False
    broken: str | None = None
    """Why the episode fails, although its environment goes on."""
    score: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class EpisodeRunner:
    """Runs the episodes of one batch after another."""

    def __init__(
        self, make_source: Callable[[Emit], EpisodeSource], encoder: Encoder, config: AgentConfig, *, max_length: int,
        max_tokens: int, read_message: ReadMessage | None = None, takes_stop: bool = True,
    ) -> None:  # fmt: skip
        """
        Args:
            max_length: limit on the tokens that the policy samples in an episode.
            max_tokens: limit on all tokens of an episode.
            takes_stop: whether the generator knows stop strings.
        """
        self._encoder, self._config = encoder, config
        self._max_length, self._max_tokens = max_length, max_tokens
        self._takes_stop = takes_stop
        self._read_message = read_message or (lambda text, _: said("assistant", text))
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._stream: Stream | None = None
        self._numbers = 0
        self._source = make_source(self._take)

    def run(
        self, requests: Sequence[GenerationRequest], prompts: Sequence[Prompt], stream: Stream,
        finished: Callable[[int, Outcome], None],
    ) -> Counts:  # fmt: skip
        """Run an episode for each request, which gives its seed and its prompt.

        Args:
            finished: called with the request's number and the outcome, in any order.
        """
        self._stream, counts = stream, Counts()
        first, self._numbers = self._numbers, self._numbers + len(requests)
        running: dict[int, _Running] = {}
        by_request: dict[int, tuple[int, int]] = {}
        """By the identity of a request, the episode and its attempt."""
        try:
            for number, (request, prompt) in enumerate(zip(requests, prompts, strict=True), start=first):
                running[number] = _Running(request, prompt)
                self._source.start(number, _task(request, prompt))
            while running:
                for event in self._waiting():
                    if event.episode not in running:
                        continue
                    each = running[event.episode]
                    if isinstance(event, Failed):
                        outcome = self._failed(each, event, counts)
                    elif event.attempt != each.attempt:
                        continue
                    elif isinstance(event, Ended):
                        counts.seconds += event.seconds
                        outcome = self._ended(each, event.observation, counts)
                    else:
                        outcome = None
                        if (turn := self._next_request(each, event)) is not None:
                            by_request[id(turn)] = event.episode, each.attempt
                            stream.submit([turn])
                    if outcome is not None:
                        finished(event.episode - first, outcome)
                        del running[event.episode]
                if not running:
                    break
                for completion in stream.wait():
                    number, attempt = by_request.pop(id(completion.request))
                    if number in running and running[number].attempt == attempt:
                        self._sampled(running[number], completion)
        except BaseException:
            self._source.forget()
            raise
        finally:
            self._stream = None
        stream.close()  # it may still sample for attempts that failed
        return counts

    def close(self) -> None:
        self._source.close()

    def _take(self, event: Event) -> None:
        """Called by the source, from any thread."""
        self._events.put(event)
        if (stream := self._stream) is not None:
            stream.wake()

    def _waiting(self) -> list[Event]:
        events = []
        while not self._events.empty():
            events.append(self._events.get())
        return events

    def _next_request(self, each: _Running, event: Asked | Called) -> GenerationRequest | None:
        """What the policy samples next, or None if a limit is reached."""
        assert isinstance(event, Asked)
        episode, observation = self._episode(each), event.observation
        each.asked = event
        try:
            if episode.turns:
                self._note(each, observation)
                episode.read(observation.messages)
            else:
                episode.reward(observation.reward)
                episode.begin(observation.messages)
            sampling, limit = self._sampling(each.prompt.sampling, observation)
        except UserError as error:
            each.broken, each.over = str(error), True
            self._source.finish(event)
            return None
        room = min(limit, each.request.max_tokens - episode.sampled_tokens, self._max_tokens - len(episode.tokens))
        if room < 1 or episode.turns >= self._config.max_turns:
            each.truncated = each.over = True
            self._source.finish(event)
            return None
        prompt = tuple(episode.tokens)
        seed = request_seed(each.request.seed, prompt)
        return GenerationRequest(each.request.sample, prompt, seed, room, sampling=sampling)

    def _sampled(self, each: _Running, completion: Completion) -> None:
        """Give the environment the policy's answer."""
        episode, asked = self._episode(each), each.asked
        assert asked is not None
        ids = completion.token_ids.tolist()
        text = decode_response(self._encoder.tokenizer, completion.request.prompt, ids)
        action = Action(
            text, self._read_message(text, ids), tuple(ids), tuple(completion.logprobs.tolist()),
            completion.finish_reason == "length", episode.turns,
        )  # fmt: skip
        episode.record(action, completion.weights_version)
        self._source.answer(asked, action)

    def _sampling(self, of_prompt: SamplingOverrides, observation: Observation) -> tuple[SamplingOverrides, int]:
        given = observation.sampling or {}
        if given.get("stop") and not self._takes_stop:
            raise UserError("an observation sets stop strings, which generation.backend=hf does not know: use vllm")
        stop = of_prompt.stop if given.get("stop") is None else tuple(given["stop"])
        return replace(of_prompt, stop=stop), given.get("max_length") or self._max_tokens

    def _episode(self, each: _Running) -> Episode:
        if each.episode is None:
            prompt = each.prompt
            messages = prompt.chat.messages if prompt.chat else [said("user", prompt.text)]
            tools = prompt.chat.tools if prompt.chat else None
            each.episode = Episode(
                self._encoder, prompt.token_ids, messages, tools=tools, by_template=self._config.history == "template"
            )
        return each.episode

    def _note(self, each: _Running, observation: Observation) -> None:
        self._episode(each).reward(observation.reward)
        each.score = each.score if observation.score is None else observation.score
        each.metrics |= observation.metrics

    def _ended(self, each: _Running, last: Observation, counts: Counts) -> Outcome:
        episode = self._episode(each)
        try:
            if not each.over:
                self._note(each, last)
        except UserError as error:
            each.broken = str(error)
        if each.broken is not None:
            return self._lost(each, each.broken, counts)
        rows = episode.rows()
        cut_short = bool(rows[-1].turns) and rows[-1].turns[-1].finish_reason == "length"
        status = "truncated" if each.truncated or cut_short else "completed"
        rollouts = [
            as_rollout(each, row, number, status, episode.began_with if number == 0 else None)
            for number, row in enumerate(rows)
        ]
        metrics = {"agent/turns": float(episode.turns), "agent/branches": float(len(rows))}
        metrics |= {f"environment/{name}": float(value) for name, value in each.metrics.items()}
        return Outcome(rollouts, episode.total_reward, each.score, metrics)

    def _failed(self, each: _Running, event: Failed, counts: Counts) -> Outcome | None:
        if event.attempt != each.attempt:
            return None
        counts.timed_out += event.timed_out
        if event.last:
            return self._lost(each, event.reason, counts)
        if event.charged:
            counts.retried += 1
            counts.reasons.append(event.reason)
        else:
            counts.restarted += 1
        begun_again = _Running(each.request, each.prompt, event.attempt + 1)
        each.__dict__.update(begun_again.__dict__)
        return None

    def _lost(self, each: _Running, reason: str, counts: Counts) -> Outcome:
        counts.failed += 1
        counts.reasons.append(reason)
        ids = tuple(each.prompt.token_ids)
        nothing = Row(ids, (False,) * len(ids), (0.0,) * len(ids), (-1,) * len(ids), ())
        return Outcome([as_rollout(each, nothing, 0, "failed", None)], torch.nan, None, {}, failed=True)


def as_rollout(each: _Running, row: Row, branch: int, status: str, began_with: str | None) -> Rollout:
    return Rollout(
        sample=each.request.sample,
        seed=each.request.seed,
        prompt=each.prompt,
        tokens=torch.tensor(row.tokens, dtype=torch.int64),
        response_mask=torch.tensor(row.mask, dtype=torch.bool),
        sampler_logprobs=torch.tensor(row.logprobs, dtype=torch.float32),
        weights_version=torch.tensor(row.versions, dtype=torch.int64),
        turns=tuple(Turn(turn.start, turn.end, turn.finish_reason, turn.reward) for turn in row.turns),
        max_length=each.request.max_tokens,
        status=status,
        branch=branch,
        began_with=began_with,
    )


def _task(request: GenerationRequest, prompt: Prompt) -> Task:
    messages = tuple(prompt.chat.messages) if prompt.chat else ()
    return Task(prompt.text, messages, prompt.label, prompt.metadata, request.seed)
