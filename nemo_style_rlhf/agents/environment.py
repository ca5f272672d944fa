"""The interface of an environment: what an episode gives to it, and what it gives back. It imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Task:
    """The beginning of one episode. Every sample of a prompt gets one of its own, which differs from the others by its seed."""

    prompt: str
    """The prompt as text, with its chat template if it has one."""
    messages: tuple[dict[str, Any], ...] = ()
    """The conversation of which a chat template made the prompt; empty for a prompt of plain text."""
    label: str | None = None
    """The row's value of data.label_key."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the row."""
    seed: int = 0
    """It is this sample's own, the same in every attempt and run. An environment that draws all of its random numbers from it
    keeps runs repeatable."""
    attempt: int = 1
    """Number of this attempt, from 1; the ones before it failed, by their own fault."""


@dataclass(frozen=True)
class Action:
    """One response of the policy."""

    text: str
    """Without special tokens."""
    message: dict[str, Any]
    """The assistant's message: its content, and its tool_calls where agent.tool_parser is set and found some."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """[len(token_ids)] nats: the log-probability of each token when it was sampled."""
    truncated: bool = False
    """Whether it ended for lack of room; one that has the `max_length` of its observation has not."""
    prompt_tokens: int = 0
    """Tokens that the policy had read before it."""
    turn: int = 0
    """Number of the response in its episode, from 0."""


@dataclass(frozen=True)
class Observation:
    """The environment's answer to an action, or the beginning of an episode."""

    messages: Sequence[dict[str, Any]] | str | Sequence[int] = ()
    """The policy reads this next: messages for the chat template, a text, or token ids. At the beginning, they are the whole
    prompt; if there are none, it is that of the row."""
    reward: float = 0.0
    """It is that of the action before this observation."""
    done: bool = False
    """Whether the episode ends here; the policy does not read the messages then."""
    score: float | None = None
    """For algorithm.filter, in place of the sum of the rewards. The last one that was given counts."""
    sampling: Mapping[str, Any] | None = None
    """Settings of the next response that differ from those of generation: `max_length` and `stop`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that are logged as environment/NAME, the mean over the episodes; the last one of a name counts."""


class Policy(Protocol):
    """The policy, as an overridden :meth:`Environment.execute` sees it."""

    async def act(self, observation: Observation) -> Action:
        """The response to ``observation``, which must not be done.

        It does not return if the episode has reached a limit (agent.max_turns, agent.max_tokens): the episode ends there.
        """


class Environment:
    """One episode. An object is made for every sample, in an episode worker, where many run side by side in one event loop: a
    method that waits should await.

    An exception ends the episode, which is tried again with a new object, at most agent.attempts times in all.
    """

    async def reset(self, task: Task) -> Observation:
        """Begin. Without messages in the answer, the policy reads the row's prompt."""
        return Observation()

    async def step(self, action: Action) -> Observation:
        """Answer an action, also the last one that fits the episode's limits."""
        raise NotImplementedError(f"{type(self).__name__} has no method step")

    async def close(self) -> None:
        """Release what the episode held, whether it ended well or failed."""

    async def execute(self, task: Task, policy: Policy) -> Observation:
        """Drive the episode from its beginning to its end, and return the last observation. Environments that need more than
        one answer for one action override it."""
        observation = await self.reset(task)
        while not observation.done:
            observation = await self.step(await policy.act(observation))
        return observation
