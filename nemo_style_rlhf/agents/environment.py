"""The interface of an environment: its inputs from an episode, and its answers. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Task:
    """The beginning of one episode. Every sample of a prompt gets its own task, with its own seed."""

    prompt: str
    """The prompt as text, with its chat template if it has one."""
    messages: tuple[dict[str, Any], ...] = ()
    """The conversation from which a chat template made the prompt; empty for a prompt of plain text."""
    label: str | None = None
    """The row's value of data.label_key."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the row."""
    seed: int = 0
    """This sample's own seed, the same in every attempt and run. An environment that draws all of its random numbers from it
    keeps runs repeatable."""
    attempt: int = 1
    """Number of this attempt, from 1. The earlier attempts failed through their own fault."""


@dataclass(frozen=True)
class Action:
    """One response of the policy."""

    text: str
    """The response without special tokens."""
    message: dict[str, Any]
    """The assistant's message: its content, and its tool_calls if agent.tool_parser is set and found any."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """[len(token_ids)] nats: the log-probability of each token when it was sampled."""
    truncated: bool = False
    """True if it ended for lack of room. A response that reached its observation's `max_length` does not count."""
    prompt_tokens: int = 0
    """Tokens that the policy had read before it."""
    turn: int = 0
    """Number of the response in its episode, from 0."""


@dataclass(frozen=True)
class Observation:
    """The environment's answer to an action, or the beginning of an episode."""

    messages: Sequence[dict[str, Any]] | str | Sequence[int] = ()
    """The policy reads this next: messages for the chat template, a text, or token ids. At the beginning, they are the whole
    prompt; if there are none, the policy reads the row's prompt."""
    reward: float = 0.0
    """Reward of the action before this observation."""
    done: bool = False
    """True if the episode ends here. The policy then does not read the messages."""
    score: float | None = None
    """Score for algorithm.filter, instead of the sum of the rewards. The last score of an episode counts."""
    sampling: Mapping[str, Any] | None = None
    """Settings of the next response that replace generation's: `max_length` and `stop`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that are logged as environment/NAME, averaged over the episodes. The last number of each name counts."""


class Policy(Protocol):
    """The policy, as an overridden :meth:`Environment.execute` sees it."""

    async def act(self, observation: Observation) -> Action:
        """Return the response to ``observation``. The observation must not be done.

        The call does not return if the episode has reached a limit (agent.max_turns, agent.max_tokens): the episode ends there.
        """


class Environment:
    """One episode. Every sample gets its own object in an episode worker. Many objects share the worker's event loop: a method
    that waits should await.

    An exception ends the attempt. The episode is retried with a new object, up to agent.attempts attempts in all.
    """

    async def reset(self, task: Task) -> Observation:
        """Begin the episode. If the answer has no messages, the policy reads the row's prompt."""
        return Observation()

    async def step(self, action: Action) -> Observation:
        """Answer an action, including the last one within the episode's limits."""
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
