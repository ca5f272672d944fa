"""Interface of reward sources: samples, scores and the scorer protocol."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.chat import Chat

SHOWN = 60
"""Maximum number of characters of a wrong answer that an error quotes."""


class Message(NamedTuple):
    role: str
    """``prompt``, ``response`` (the policy's) or ``environment``."""
    text: str


class ScoringSample:
    """The data of a sample that sources may read."""

    def __init__(
        self, tokens: Tensor, label: str | None, messages: Callable[[], Sequence[Message]],
        metadata: Mapping[str, Any] | None = None, chat: Chat | None = None,
    ) -> None:  # fmt: skip
        """A sample whose text is made on demand.

        Args:
            tokens: [L] int64, prompt and response, in the policy's tokenizer.
            messages: the sample as text without special tokens, called by the first source that reads text.
            metadata: further fields of the prompt's row.
            chat: the conversation from which a chat template made the prompt.
        """
        self.tokens = tokens
        self.label = label
        self.metadata = metadata or {}
        self.chat = chat
        self._read = messages

    @staticmethod
    def of_texts(
        tokens: Tensor, prompt: str, response: str, label: str | None = None, metadata: Mapping[str, Any] | None = None,
        chat: Chat | None = None,
    ) -> "ScoringSample":  # fmt: skip
        """A sample of one turn, from its texts."""
        messages = [Message("prompt", prompt), Message("response", response)]
        return ScoringSample(tokens, label, lambda: messages, metadata, chat)

    @cached_property
    def messages(self) -> Sequence[Message]:
        return self._read()

    @property
    def prompt(self) -> str:
        return self.messages[0].text

    @property
    def response(self) -> str:
        """All text that the policy wrote."""
        return "".join(message.text for message in self.messages if message.role == "response")

    @property
    def turns(self) -> list[dict[str, str]]:
        """The ``role`` and ``content`` of each message after the prompt: responses, and the environment's messages in between."""
        return [{"role": message.role, "content": message.text} for message in self.messages[1:]]


@dataclass
class Scores:
    """Scores of a group of B samples with N tokens in all."""

    rewards: Tensor
    """[B] float32; NaN where ``failed``."""
    filter_scores: Tensor | None = None
    """[B] float32: scores for algorithm.filter, or None to use ``rewards``; NaN where ``failed``."""
    values: Tensor | None = None
    """[N] float32, action-aligned values from the critic process."""
    critic_steps: frozenset[int] = frozenset()
    """Train steps that the critic had seen when it gave ``values``; more than one if it changed between its answers."""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """More metrics, [B] each."""
    failed: Tensor | None = None
    """[B] bool: True for samples that a source could not score."""
    reasons: list["RewardError"] = field(default_factory=list)
    """Reasons of the failures, at least one if there are any."""

    @property
    def failures(self) -> Tensor:
        return torch.zeros(len(self.rewards), dtype=torch.bool) if self.failed is None else self.failed

    @staticmethod
    def joined(groups: "Sequence[Scores]") -> "Scores":
        """Join consecutive groups into one; a metric that only some groups have is NaN in the others."""
        values = [group.values for group in groups if group.values is not None]
        names = sorted({name for group in groups for name in group.extra})
        with_filter = any(group.filter_scores is not None for group in groups)
        filtered_by = [g.rewards if g.filter_scores is None else g.filter_scores for g in groups]
        return Scores(
            rewards=torch.cat([group.rewards for group in groups]),
            filter_scores=torch.cat(filtered_by) if with_filter else None,
            values=torch.cat(values) if len(values) == len(groups) else None,
            critic_steps=frozenset().union(*(group.critic_steps for group in groups)),
            extra={
                name: torch.cat([g.extra.get(name, torch.full_like(g.rewards, torch.nan)) for g in groups])
                for name in names
            },
            failed=torch.cat([group.failures for group in groups]),
            reasons=[reason for group in groups for reason in group.reasons],
        )

    def select(self, rows: Sequence[int], lengths: Sequence[int]) -> "Scores":
        """The scores of the samples ``rows``; ``lengths`` [B] are tokens per sample."""
        picked = torch.tensor(list(rows), dtype=torch.long)
        parts = None if self.values is None else self.values.split(list(lengths))
        return Scores(
            rewards=self.rewards[picked],
            filter_scores=None if self.filter_scores is None else self.filter_scores[picked],
            values=None if parts is None else torch.cat([parts[row] for row in rows]),
            critic_steps=self.critic_steps,
            extra={name: value[picked] for name, value in self.extra.items()},
            failed=self.failures[picked],
        )


class RewardError(UserError):
    """A source failed on samples; the sentence names the source, the failure, and what to change."""


def quoted(value: object) -> str:
    """``value`` as a :class:`RewardError` quotes it: on one line, and its beginning if it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


class Scorer(Protocol):
    def score(self, samples: Sequence[ScoringSample]) -> "Future[Scores]":
        """Start scoring a group; the future carries every error."""

    def close(self) -> None:
        """Release processes and connections."""
