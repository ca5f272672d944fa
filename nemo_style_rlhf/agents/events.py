"""Events and answers that pass between the trainer, which samples, and the sources of episodes: workers and gateway."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nemo_style_rlhf.agents.environment import Action, Observation, Task


@dataclass(frozen=True)
class Asked:
    """An environment waits for the policy's answer to an observation: the episode goes on where it stands."""

    episode: int
    attempt: int
    observation: Observation


@dataclass(frozen=True)
class Called:
    """A program waits for the policy's answer to a conversation, or to a text: the episode goes on from what is known of it."""

    episode: int
    attempt: int
    call: int
    """Names the call among those of the episode."""
    prompt: Sequence[dict[str, Any]] | Sequence[int] | str
    """The conversation, token ids, or text; not empty unless it is a text."""
    tools: Sequence[dict[str, Any]] | None = None
    sampling: Mapping[str, Any] | None = None
    """`max_length` and `stop`, as in :class:`Observation`."""


@dataclass(frozen=True)
class Ended:
    """An episode is complete."""

    episode: int
    attempt: int
    observation: Observation
    """The last one."""
    seconds: float = 0.0
    """That the environment took."""
    answer: int | None = None
    """The call whose answer a program gives as the one to score; None if it names none."""


@dataclass(frozen=True)
class Failed:
    """An attempt failed."""

    episode: int
    attempt: int
    reason: str
    """A sentence for the user."""
    timed_out: bool
    last: bool
    """Whether the episode has failed with it; else it begins again."""
    charged: bool = True
    """False for an episode that merely shared a worker with the one that failed: its attempts are not used up."""


Event = Asked | Called | Ended | Failed


class EpisodeSource(Protocol):
    """Runs episodes. Every method returns at once; events come through the function that the source was made with, from any
    thread and in any order. An episode's attempt number tells events of an earlier attempt from those of the running one."""

    def start(self, episode: int, task: Task) -> None:
        """Queue an episode."""

    def answer(self, asked: Asked | Called, action: Action) -> None:
        """Answer the policy's part; an answer to an attempt that has ended is ignored."""

    def finish(self, asked: Asked | Called, reason: str = "") -> None:
        """Give no answer. An environment's episode ends with the observation that asked; a program reads an error.

        Args:
            reason: one sentence; a limit is reached if it is empty.
        """

    def waits_for(self, episode: int) -> str:
        """A few words, such as ``Hang, line 11``, that name the cause of an episode's wait if it is not the policy."""

    def forget(self) -> None:
        """Abandon all episodes; no event of theirs comes after this returns."""

    def close(self) -> None:
        """End every process."""


Emit = Callable[[Event], None]
