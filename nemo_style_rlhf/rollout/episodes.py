"""Runs the episodes of a batch: passes the observations of environments to a generator, and its samples back.

Episodes run side by side, each at its own pace. Their order changes nothing about any of them: the seed of an answer follows
from the sample and from what the policy has read.
"""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nemo_style_rlhf.agents.environment import Action, Observation, Task
from nemo_style_rlhf.agents.episode import Episode
from nemo_style_rlhf.agents.events import Asked, Called, Emit, Ended, EpisodeSource, Event, Failed
from nemo_style_rlhf.agents.rows import Row
from nemo_style_rlhf.agents.sessions import Session, request_seed
from nemo_style_rlhf.data.encoding import Encoder, decode_response
from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.data.turns import said
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, Stream
from nemo_style_rlhf.rollout.outcomes import Counts, Outcome
from nemo_style_rlhf.rollout.types import Rollout, Turn
from nemo_style_rlhf.schema.agent import AgentConfig
from nemo_style_rlhf.schema.chat import Chat
from nemo_style_rlhf.schema.generation import SamplingOverrides

log = logging.getLogger(__name__)
PATIENCE_S = 60.0
"""Seconds without a finished answer or episode after which a run says what it waits for."""
ReadMessage = Callable[[str, Sequence[int]], dict[str, Any]]
"""Makes the assistant's message of a response's text and token ids, with its tool calls."""


@dataclass
class _Running:
    request: GenerationRequest
    prompt: Prompt
    attempt: int = 1
    episode: Episode | None = None
    """Set if an environment runs the episode."""
    session: Session | None = None
    """Set if a program runs the episode."""
    over: bool = False
    """True if the environment was told to end. It ends with the observation that is already noted."""
    truncated: bool = False
    broken: str | None = None
    """Reason why the episode fails, although its environment continues."""
    score: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


NO_ANSWER = (
    "several of the program's calls were not continued and none has read the others' answers: name the one to score, by "
    '"answer": the id of its completion, in the program\'s result'
)


class _Watch:
    """Logs what the samples of a batch wait for, whenever nothing has arrived for long."""

    def __init__(self, samples: int, waited_for: Callable[[], Sequence[str]]) -> None:
        """``samples`` is the size of the batch. ``waited_for``, called in a thread, says what each unfinished one waits for."""
        self._samples, self._waited_for = samples, waited_for
        self._ended = threading.Event()
        self.progress()
        threading.Thread(target=self._look, name="episodes-watch", daemon=True).start()

    def progress(self) -> None:
        self._since = time.monotonic()

    def end(self) -> None:
        self._ended.set()

    def _look(self) -> None:
        while not self._ended.wait(PATIENCE_S / 60):
            if time.monotonic() - self._since > PATIENCE_S:
                self.progress()
                kinds = Counter(waits := self._waited_for())
                said = [f"{what} ({count})" if len(kinds) > 1 else what for what, count in kinds.most_common(3)]
                log.warning("the run waits for %d of %d samples: %s", len(waits), self._samples, ", ".join(said))


class EpisodeRunner:
    """Runs the episodes of one batch after another."""

    def __init__(
        self, make_source: Callable[[Emit], EpisodeSource], encoder: Encoder, config: AgentConfig, *, max_length: int,
        max_tokens: int, vocabulary: int, scores_text: bool = False, read_message: ReadMessage | None = None,
        takes_stop: bool = True,
    ) -> None:  # fmt: skip
        """Take episodes from the source that ``make_source`` starts.

        Args:
            max_length: limit on the tokens that the policy samples in an episode.
            max_tokens: limit on all tokens of an episode.
            vocabulary: number of the policy's token ids.
            scores_text: whether an episode's answer is read to score it, so that a program's must be known.
            takes_stop: whether the generator knows stop strings.
        """
        self._encoder, self._config = encoder, config
        self._max_length, self._max_tokens, self._vocabulary = max_length, max_tokens, vocabulary
        self._scores_text, self._takes_stop = scores_text, takes_stop
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
        asked: dict[int, Asked | Called] = {}
        """The event that waits for the answer to a request, by the identity of the request."""
        watch = _Watch(len(requests), lambda: self._waited_for(list(running), list(asked.values())))
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
                        outcome = self._ended(each, event, counts)
                    else:
                        outcome = None
                        turn = self._turn(each, event) if isinstance(event, Asked) else self._call(each, event)
                        if turn is not None:
                            asked[id(turn)] = event
                            stream.submit([turn])
                    if outcome is not None:
                        finished(event.episode - first, outcome)
                        del running[event.episode]
                        watch.progress()
                if not running:
                    break
                for completion in stream.wait():
                    watch.progress()
                    event = asked.pop(id(completion.request))
                    if event.episode in running and running[event.episode].attempt == event.attempt:
                        self._sampled(running[event.episode], event, completion)
        except BaseException:
            self._source.forget()
            raise
        finally:
            self._stream = None
            watch.end()
        stream.close()  # it may still sample for attempts that failed
        return counts

    def close(self) -> None:
        self._source.close()

    def _waited_for(self, running: Sequence[int], asked: Sequence[Asked | Called]) -> list[str]:
        """Say what each running episode waits for."""
        of_policy = {each.episode for each in asked}
        return ["the policy" if episode in of_policy else self._source.waits_for(episode) for episode in running]

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

    def _turn(self, each: _Running, event: Asked) -> GenerationRequest | None:
        """The next request to the policy for an environment, or None if a limit is reached."""
        episode, observation = self._episode(each), event.observation
        try:
            if episode.turns:
                self._note(each, observation)
                episode.read(observation.messages)
            else:
                episode.reward(observation.reward)
                episode.begin(observation.messages)
            prompt = tuple(episode.tokens)
            self._require_readable(prompt)
            sampling, limit = self._sampling(each.prompt.sampling, observation.sampling)
        except UserError as error:
            each.broken, each.over = str(error), True
            self._source.finish(event)
            return None
        room = min(limit, each.request.max_tokens - episode.sampled_tokens, self._max_tokens - len(prompt))
        if room < 1 or episode.turns >= self._config.max_turns:
            each.truncated = each.over = True
            self._source.finish(event)
            return None
        seed = request_seed(each.request.seed, prompt, asked=0)
        return GenerationRequest(each.request.sample, prompt, seed, room, sampling=sampling)

    def _require_readable(self, prompt: Sequence[int]) -> None:
        """Raise UserError if the policy cannot read a prompt: it has no tokens, or one that is not in the vocabulary."""
        if not prompt:
            raise UserError("the policy is asked to answer a prompt of no tokens: give it a text")
        if not 0 <= min(prompt) <= max(prompt) < self._vocabulary:
            wrong = next(token for token in prompt if not 0 <= token < self._vocabulary)
            raise UserError(f"token id {wrong} is not in the policy's vocabulary of {self._vocabulary}")

    def _call(self, each: _Running, event: Called) -> GenerationRequest | None:
        """The next request to the policy for a program. All limits apply to a single call, as calls may overlap."""
        each.session = each.session or Session(each.request.seed)
        try:
            prompt = tuple(each.session.prompt_for(event, self._encoder))
            self._require_readable(prompt)
            sampling, limit = self._sampling(each.prompt.sampling, event.sampling)
        except UserError as error:
            self._source.finish(event, str(error))
            return None
        room = min(limit, each.request.max_tokens, self._max_tokens - len(prompt))
        if room < 1:
            each.truncated = True
            self._source.finish(event)
            return None
        seed = each.session.seed_for(event, prompt)
        return GenerationRequest(each.request.sample, prompt, seed, room, sampling=sampling)

    def _sampled(self, each: _Running, event: Asked | Called, completion: Completion) -> None:
        """Give the environment or the program the policy's answer. One that ends where they wanted it to end is not truncated."""
        ids, prompt = completion.token_ids.tolist(), completion.request.prompt
        given = (event.observation if isinstance(event, Asked) else event).sampling or {}
        truncated = completion.finish_reason == "length" and given.get("max_length") != completion.request.max_tokens
        text = decode_response(self._encoder.tokenizer, prompt, ids)
        action = Action(
            text, self._read_message(text, ids), tuple(ids), tuple(completion.logprobs.tolist()),
            truncated, len(prompt), 0 if each.episode is None else each.episode.turns,
        )  # fmt: skip
        if isinstance(event, Called):
            assert each.session is not None
            each.session.record(event, prompt, action, completion.weights_version)
        else:
            self._episode(each).record(action, completion.weights_version)
        self._source.answer(event, action)

    def _sampling(self, of_prompt: SamplingOverrides, given: Mapping[str, Any] | None) -> tuple[SamplingOverrides, int]:
        """The settings of one response, and the limit on its tokens."""
        given = given or {}
        if given.get("stop") and not self._takes_stop:
            raise UserError("stop strings, which generation.backend=hf does not know, were asked for: use vllm")
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

    def _ended(self, each: _Running, event: Ended, counts: Counts) -> Outcome:
        episode, session, last = each.episode, each.session, event.observation
        try:
            if session is not None:
                each.score, each.metrics = last.score, dict(last.metrics)
            elif not each.over:
                self._note(each, last)
        except UserError as error:
            each.broken = str(error)
        known = session is None or session.has_answer(event.answer)
        if not known and self._scores_text:
            each.broken = NO_ANSWER
        if each.broken is not None:
            return self._lost(each, each.broken, counts)
        rows = session.rows(event.answer) if session is not None else []
        rows = rows or self._episode(each).rows()
        ends = [row.turns[-1] for row in (rows[-1:] if known else rows) if row.turns]
        cut_short = any(turn.finish_reason == "length" for turn in ends)
        status = "truncated" if each.truncated or cut_short else "completed"
        rollouts = [as_rollout(each, row, number, status) for number, row in enumerate(rows)]
        of_program = session is not None and episode is None
        if session is not None and episode is None:
            rollouts[-1].began_with, rollouts[-1].asked = self._asked(rollouts[-1], session.first_call(event.answer))
        else:
            episode = self._episode(each)
            rollouts[0].began_with, rollouts[0].asked = episode.began_with, episode.asked
            for rollout, observed in zip(rollouts, episode.observed(), strict=True):
                rollout.observed = observed
        turns = sum(len(row.turns) for row in rows)
        metrics = {"agent/turns": float(turns), "agent/branches": float(len(rows))}
        metrics |= {f"environment/{name}": float(value) for name, value in each.metrics.items()}
        reward = last.reward if session is not None else self._episode(each).total_reward
        return Outcome(rollouts, reward, each.score, metrics, of_program=of_program)

    def _asked(self, rollout: Rollout, first: Called | None) -> tuple[str | None, Chat | None]:
        """A program's first question, as text and as a conversation; None if it is the row's prompt, or not known."""
        tokens = rollout.tokens[: rollout.prompt_length].tolist()
        if first is None or tokens == list(rollout.prompt.token_ids):
            return None, None
        if isinstance(first.prompt, str):
            return first.prompt, None
        text = str(self._encoder.tokenizer.decode(tokens, skip_special_tokens=False))
        messages = [message for message in first.prompt if isinstance(message, dict)]
        tools = [*first.tools] if first.tools else None
        return text, Chat(messages, tools, self._encoder.today) if messages else None

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
        return Outcome([as_rollout(each, nothing, 0, "failed")], torch.nan, None, {}, failed=True)


def as_rollout(each: _Running, row: Row, branch: int, status: str) -> Rollout:
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
    )


def _task(request: GenerationRequest, prompt: Prompt) -> Task:
    messages = tuple(prompt.chat.messages) if prompt.chat else ()
    return Task(prompt.text, messages, prompt.label, prompt.metadata, request.seed)
