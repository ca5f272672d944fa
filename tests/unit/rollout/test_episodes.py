"""What the policy samples in an episode does not depend on how often, and when, its attempts fail."""

import threading
import time
from collections import deque
from collections.abc import Sequence

import pytest
import torch

from nemo_style_rlhf.agents.environment import Action, Observation, Task
from nemo_style_rlhf.agents.events import Asked, Called, Emit, Ended, Failed
from nemo_style_rlhf.data.encoding import Encoder
from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, SampleId
from nemo_style_rlhf.generation.seeds import sample_seed
from nemo_style_rlhf.rollout import episodes
from nemo_style_rlhf.rollout.episodes import EpisodeRunner
from nemo_style_rlhf.rollout.outcomes import Counts
from nemo_style_rlhf.rollout.types import Rollout
from nemo_style_rlhf.schema.agent import AgentConfig
from tests.unit.agents.chat_templates import CHATML, encoder

EPISODES = 3


class Source:
    """Plays episodes of two answers, of which each fails in its first attempt: never, while it waits for the first answer, or
    after it."""

    def __init__(self, emit: Emit, fails: str) -> None:
        self._emit, self._fails = emit, fails

    def start(self, episode: int, task: Task) -> None:
        self._emit(Asked(episode, 1, Observation()))
        if self._fails == "waiting":
            self._begin_again(episode)

    def answer(self, asked: Asked | Called, action: Action) -> None:
        if asked.attempt == 1 and self._fails == "waiting":
            return  # it has ended
        if asked.attempt == 1 and self._fails == "answered":
            self._begin_again(asked.episode)
        elif action.turn == 0:
            self._emit(Asked(asked.episode, asked.attempt, Observation("Go on.")))
        else:
            self._emit(Ended(asked.episode, asked.attempt, Observation(reward=1.0, done=True)))

    def _begin_again(self, episode: int) -> None:
        self._emit(Failed(episode, 1, "it broke", timed_out=False, last=False))
        self._emit(Asked(episode, 2, Observation()))

    def finish(self, asked: Asked | Called, reason: str = "") -> None:
        raise AssertionError("no limit is reached")

    def waits_for(self, episode: int) -> str:
        return "Hang, line 11"

    def forget(self) -> None: ...

    def close(self) -> None: ...


class Stream:
    """Samples tokens that follow from the seed, one request at a time."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._waiting: deque[GenerationRequest] = deque()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._waiting += requests

    def wait(self) -> list[Completion]:
        if not self._waiting:
            return []
        request = self._waiting.popleft()
        tokens = torch.tensor([request.seed % self._vocabulary, request.seed // 7 % self._vocabulary])
        return [Completion(request, tokens, torch.tensor([-0.5, -1.5]), "stop", 4)]

    def wake(self) -> None: ...

    def close(self) -> None: ...


def play(
    chatml: Encoder, fails: str, source: type[Source] = Source, stream: type[Stream] = Stream
) -> tuple[list[Rollout], Counts]:
    ids = chatml.prompt("What is a cat?")
    prompts = [Prompt(number, ids, "What is a cat?") for number in range(EPISODES)]
    samples = [SampleId(1, number, 0) for number in range(EPISODES)]
    requests = [GenerationRequest(sample, tuple(ids), sample_seed(5, sample), 20) for sample in samples]
    runner = EpisodeRunner(
        lambda emit: source(emit, fails),
        chatml,
        AgentConfig(path="environment.py"),
        max_length=20,
        max_tokens=100,
        vocabulary=len(chatml.tokenizer),
    )
    rollouts: dict[int, Rollout] = {}

    def finished(number: int, outcome) -> None:  # type: ignore[no-untyped-def]
        (rollouts[number],) = outcome.rollouts
        assert outcome.reward == 1.0

    counts = runner.run(requests, prompts, stream(len(chatml.tokenizer)), finished)  # type: ignore[arg-type]
    return [rollouts[number] for number in range(EPISODES)], counts


@pytest.mark.parametrize("fails", ["waiting", "answered"])
def test_a_repeated_attempt_samples_what_the_first_one_sampled(fails: str) -> None:
    """Its environment meets the same policy; an answer to the attempt before, which comes late, is nobody's."""
    chatml = encoder(CHATML)
    undisturbed, counts = play(chatml, "never")
    assert counts.retried == 0 and len({tuple(each.tokens.tolist()) for each in undisturbed}) == EPISODES
    repeated, counts = play(chatml, fails)
    assert counts.retried == EPISODES
    for one, other in zip(undisturbed, repeated, strict=True):
        assert one.turns == other.turns and len(one.turns) == 2
        for name in ("tokens", "response_mask", "sampler_logprobs", "weights_version"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name


class Hanging(Source):
    """Each episode asks once; the last one takes its time before it does."""

    def start(self, episode: int, task: Task) -> None:
        asks = threading.Timer(1.5 if episode == EPISODES - 1 else 0, self._emit, [Asked(episode, 1, Observation())])
        asks.start()

    def answer(self, asked: Asked | Called, action: Action) -> None:
        self._emit(Ended(asked.episode, asked.attempt, Observation(reward=1.0, done=True)))


class SlowStream(Stream):
    """Its first sample takes half a second."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self._until = time.monotonic() + 0.5

    def wait(self) -> list[Completion]:
        time.sleep(0.02)
        return super().wait() if time.monotonic() > self._until else []


def test_a_run_that_waits_for_long_says_for_what(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episodes, "PATIENCE_S", 0.2)
    play(encoder(CHATML), "never", Hanging, SlowStream)
    assert "the run waits for 3 of 3 samples: the policy (2), Hang, line 11 (1)" in caplog.text
    assert "the run waits for 1 of 3 samples: Hang, line 11\n" in caplog.text


class Once:
    """Each episode asks once, and ends with what it was told. What it asks is its prompt's."""

    def __init__(self, emit: Emit, asks: dict[str, Observation | Sequence[int] | str]) -> None:
        self._emit, self._asks = emit, asks
        self.told: dict[int, str] = {}
        """By episode, the reason for which there was no answer; empty at a limit."""

    def start(self, episode: int, task: Task) -> None:
        what = self._asks[task.prompt]
        if isinstance(what, Observation):
            self._emit(Asked(episode, 1, what))
        else:
            self._emit(Called(episode, 1, 0, what))

    def answer(self, asked: Asked | Called, action: Action) -> None:
        self._emit(Ended(asked.episode, 1, Observation(reward=1.0, done=True)))

    def finish(self, asked: Asked | Called, reason: str = "") -> None:
        self.told[asked.episode] = reason
        self._emit(Ended(asked.episode, 1, Observation(reward=0.5, done=True)))

    def waits_for(self, episode: int) -> str:
        return "its program"

    def forget(self) -> None: ...

    def close(self) -> None: ...


def play_once(asks: dict[str, Observation | Sequence[int] | str], *, vocabulary: int, max_tokens: int = 100) -> Once:
    """Play an episode for each of ``asks``. ``outcomes`` of the source that it returns are theirs, in order."""
    chatml, made = encoder(CHATML), list[Once]()
    prompts = [Prompt(number, chatml.prompt(text), text) for number, text in enumerate(asks)]
    requests = [
        GenerationRequest(SampleId(1, number, 0), tuple(prompt.token_ids), number, 20)
        for number, prompt in enumerate(prompts)
    ]

    def make(emit: Emit) -> Once:
        made.append(Once(emit, asks))
        return made[0]

    runner = EpisodeRunner(
        make, chatml, AgentConfig(path="environment.py"), max_length=20, max_tokens=max_tokens, vocabulary=vocabulary
    )
    outcomes = {}
    made[0].counts = runner.run(requests, prompts, Stream(50), outcomes.__setitem__)  # type: ignore[attr-defined, arg-type]
    made[0].outcomes = [outcomes[number] for number in range(len(asks))]  # type: ignore[attr-defined]
    return made[0]


def test_a_prompt_that_the_policy_cannot_read_ends_its_episode_alone() -> None:
    """A tokenizer may know more ids than the model; a text may have no tokens."""
    known = len(encoder(CHATML).tokenizer)
    source = play_once({"well": [5, 6], "beyond": [5, known], "negative": [-1], "empty": ""}, vocabulary=known)
    assert [outcome.reward for outcome in source.outcomes] == [1.0, 0.5, 0.5, 0.5]
    assert source.told == {
        1: f"token id {known} is not in the policy's vocabulary of {known}",
        2: f"token id -1 is not in the policy's vocabulary of {known}",
        3: "the policy is asked to answer a prompt of no tokens: give it a text",
    }
    chatml = encoder(CHATML)
    (largest,) = {max(chatml.prompt("a cat"))}
    source = play_once({"a cat": Observation()}, vocabulary=largest)
    assert source.outcomes[0].failed and "is not in the policy's vocabulary" in source.counts.reasons[0]


def test_sources_score_what_a_program_asked_and_not_its_row() -> None:
    chatml = encoder(CHATML)
    other = [{"role": "user", "content": "Another question"}]
    source = play_once({"text": "one two", "chat": other, "ids": [5, 6]}, vocabulary=len(chatml.tokenizer))
    text, chat, ids = (outcome.scored[0] for outcome in source.outcomes)
    assert (text.prompt_text, text.chat) == ("one two", None)
    assert chat.prompt_text == chatml.chat(other, add_generation_prompt=True)
    assert chat.chat is not None and chat.chat.messages == other
    assert ids.prompt_text == chatml.tokenizer.decode([5, 6]) and ids.chat is None


def test_a_program_that_reaches_the_limit_of_tokens_is_truncated() -> None:
    source = play_once({"well": [5] * 9, "long": [5] * 10}, vocabulary=100, max_tokens=10)
    assert source.told == {1: ""}
    assert [outcome.rollouts[-1].status for outcome in source.outcomes] == ["completed", "truncated"]


class Drafting(Once):
    """Asks twice, side by side, and names one of its answers, or none."""

    def __init__(self, emit: Emit, named: int | None) -> None:
        super().__init__(emit, {})
        self._named, self._answered = named, 0

    def start(self, episode: int, task: Task) -> None:
        for call in range(2):
            self._emit(Called(episode, 1, call, [5, call]))

    def answer(self, asked: Asked | Called, action: Action) -> None:
        self._answered += 1
        if self._answered == 2:
            self._emit(Ended(asked.episode, 1, Observation(reward=1.0, done=True), answer=self._named))


@pytest.mark.parametrize(
    ("scores_text", "named", "fails"), [(True, None, True), (True, 0, False), (False, None, False)]
)
def test_a_program_whose_answer_is_not_known_fails_where_it_is_scored(
    scores_text: bool, named: int | None, fails: bool
) -> None:
    chatml, outcomes = encoder(CHATML), {}
    runner = EpisodeRunner(
        lambda emit: Drafting(emit, named), chatml, AgentConfig(path="environment.py"), max_length=20, max_tokens=100,
        vocabulary=100, scores_text=scores_text,
    )  # fmt: skip
    request = GenerationRequest(SampleId(1, 0, 0), (5,), 3, 20)
    prompt = Prompt(0, [5], "a")
    counts = runner.run([request], [prompt], Stream(50), outcomes.__setitem__)  # type: ignore[arg-type]
    assert outcomes[0].failed == fails and any('"answer": the id of' in reason for reason in counts.reasons) == fails
    if named is not None:
        assert outcomes[0].rollouts[-1].tokens[1] == named
