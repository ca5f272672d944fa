"""What the policy samples in an episode does not depend on how often, and when, its attempts fail."""

from collections import deque
from collections.abc import Sequence

import pytest
import torch

from nemo_style_rlhf.agents.environment import Action, Observation, Task
from nemo_style_rlhf.agents.events import Asked, Called, Emit, Ended, Failed
from nemo_style_rlhf.data.encoding import Encoder
from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, SampleId, sample_seed
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
        request = self._waiting.popleft()
        tokens = torch.tensor([request.seed % self._vocabulary, request.seed // 7 % self._vocabulary])
        return [Completion(request, tokens, torch.tensor([-0.5, -1.5]), "stop", 4)]

    def wake(self) -> None: ...

    def close(self) -> None: ...


def play(chatml: Encoder, fails: str) -> tuple[list[Rollout], Counts]:
    ids = chatml.prompt("What is a cat?")
    prompts = [Prompt(number, ids, "What is a cat?") for number in range(EPISODES)]
    samples = [SampleId(1, number, 0) for number in range(EPISODES)]
    requests = [GenerationRequest(sample, tuple(ids), sample_seed(5, sample), 20) for sample in samples]
    runner = EpisodeRunner(
        lambda emit: Source(emit, fails), chatml, AgentConfig(path="environment.py"), max_length=20, max_tokens=100
    )
    rollouts: dict[int, Rollout] = {}

    def finished(number: int, outcome) -> None:  # type: ignore[no-untyped-def]
        (rollouts[number],) = outcome.rollouts
        assert outcome.reward == 1.0

    counts = runner.run(requests, prompts, Stream(len(chatml.tokenizer)), finished)  # type: ignore[arg-type]
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
