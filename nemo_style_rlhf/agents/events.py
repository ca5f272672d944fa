"""Events and answers between the trainer and the sources of episodes: workers and gateway. The trainer samples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nemo_style_rlhf.agents.environment import Action, Observation, Task


@dataclass(frozen=True)
class Asked:
    """An environment waits for the policy's answer to an observation. The episode continues from its current state."""

    episode: int
    attempt: int
    observation: Observation


@dataclass(frozen=True)
class Called:
    """A program waits for the policy's answer to a conversation or a text. The episode continues from its known part."""

    episode: int
    attempt: int
    call: int
    """Number of the call within the attempt."""
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
    """The last observation."""
    seconds: float = 0.0
    """Seconds that the environment took."""
    answer: int | None = None
    """The call whose answer the program names as the one to score, or None."""


@dataclass(frozen=True)
class Failed:
    """An attempt failed."""

    episode: int
    attempt: int
    reason: str
    """A sentence for the user."""
    timed_out: bool
    last: bool
    """True if the episode has failed for good; otherwise it begins again."""
    charged: bool = True
    """False if the attempt was not at fault, for example if it only shared a worker with a failed one. No attempt is used up."""


Event = Asked | Called | Ended | Failed


class EpisodeSource(Protocol):
    """Runs episodes. Every method returns at once; events come through the function that the source was made with, from any
    thread and in any order. The attempt number separates an episode's earlier attempts from the running one."""

    def start(self, episode: int, task: Task) -> None:
        """Queue an episode."""

    def answer(self, asked: Asked | Called, action: Action) -> None:
        """Deliver the policy's answer. An answer to an attempt that has ended is ignored."""

    def finish(self, asked: Asked | Called, reason: str = "") -> None:
        """Give no answer. An environment's episode ends with the observation that asked; a program reads an error.

        Args:
            reason: one sentence; empty if a limit was reached.
        """

    def waits_for(self, episode: int) -> str:
        """A few words, such as ``Hang, line 11``, that name what the episode waits for if not the policy."""

    def forget(self) -> None:
        """Abandon all episodes. None of their events arrives after this returns."""

    def close(self) -> None:
        """End every process."""


Emit = Callable[[Event], None]
