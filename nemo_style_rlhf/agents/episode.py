"""The tokens of an episode that an environment drives: one growing list, token in and token out."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nemo_style_rlhf.agents.environment import Action
from nemo_style_rlhf.agents.rows import Row, SampledSpan
from nemo_style_rlhf.agents.tokens import Observed, continuation
from nemo_style_rlhf.data.encoding import Encoder
from nemo_style_rlhf.data.records import Dropped
from nemo_style_rlhf.data.turns import said
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.chat import Chat, Message, plain_text


@dataclass
class _Branch:
    """A row that is still growing."""

    tokens: list[int]
    observed: str | None = None
    """The environment's words before this branch; None for the first branch."""
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[SampledSpan] = field(default_factory=list)

    def __post_init__(self) -> None:
        tokens, self.tokens = self.tokens, []
        self.read(tokens)

    def read(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.mask += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)

    @property
    def row(self) -> Row:
        return Row(tuple(self.tokens), tuple(self.mask), tuple(self.logprobs), tuple(self.versions), tuple(self.turns))


class Episode:
    """One attempt at an episode."""

    def __init__(
        self, encoder: Encoder, prompt_ids: Sequence[int], messages: Sequence[Message], *,
        tools: list[dict[str, Any]] | None = None, by_template: bool = False,
    ) -> None:  # fmt: skip
        """Begin with the row's prompt.

        Args:
            prompt_ids: token ids of the row's prompt.
            messages: the conversation that they render, for the chat template.
            by_template: begin a new branch whenever the chat template rewrites the past; else the tokens already read stay.
        """
        self._encoder, self._tools, self._by_template = encoder, tools, by_template
        self._branches = [_Branch(list(prompt_ids))]
        self._messages = list(messages)
        self.turns = 0
        self.sampled_tokens = 0
        """Tokens that the policy has sampled."""
        self.began_with: str | None = None
        """The environment's first text, if it is not the row's prompt."""
        self.asked: Chat | None = None
        """The conversation that ``began_with`` renders, if any."""

    @property
    def tokens(self) -> list[int]:
        """The token ids that the policy reads next."""
        return self._branches[-1].tokens

    def begin(self, observed: Observed) -> None:
        """Begin with another prompt than the row's. An empty prompt changes nothing.

        Raises:
            UserError: the chat template is missing or refuses the messages.
        """
        if not observed:
            return
        if isinstance(observed, str):
            self._messages, self.began_with = [said("user", observed)], observed
            ids = self._encoder.prompt(observed)
        elif isinstance(observed[0], int):
            ids = [token for token in observed if isinstance(token, int)]
            self.began_with = str(self._encoder.tokenizer.decode(ids))
        else:
            self._messages = [message for message in observed if not isinstance(message, int)]
            self.began_with = self._whole()
            self.asked = Chat(list(self._messages), self._tools, self._encoder.today)
            ids = self._encoder.rendered(self.began_with)
        self._branches = [_Branch(ids)]

    def read(self, observed: Observed) -> None:
        """Append what an observation adds.

        Raises:
            UserError: see :func:`tokens.continuation`.
        """
        branch = self._branches[-1]
        messages = [] if isinstance(observed, str) else [each for each in observed if not isinstance(each, int)]
        if messages and self._by_template:
            ids = self._encoder.rendered(self._whole(messages))
            if ids[: len(branch.tokens)] == branch.tokens:
                branch.read(ids[len(branch.tokens) :])
            else:
                self._branches.append(_Branch(ids, "\n".join(map(plain_text, messages))))
        else:
            sampled = branch.tokens[branch.turns[-1].start :] if branch.turns else []
            branch.read(continuation(self._encoder, self._messages, sampled, observed, tools=self._tools))
        self._messages += messages

    def record(self, action: Action, version: int) -> None:
        """Append an action, sampled by the weights of ``version``."""
        branch, start = self._branches[-1], len(self.tokens)
        count = len(action.token_ids)
        branch.tokens += action.token_ids
        branch.mask += [True] * count
        branch.logprobs += action.logprobs
        branch.versions += [version] * count
        branch.turns.append(SampledSpan(start, start + count, "length" if action.truncated else "stop"))
        self._messages.append(action.message)
        self.turns += 1
        self.sampled_tokens += count

    def reward(self, reward: float) -> None:
        """Add to the reward of the last action.

        Raises:
            UserError: the episode has no action yet.
        """
        if not reward:
            return
        if not self.turns:
            raise UserError(f"reset gave a reward of {reward:g}, before there was an action: give it to a step")
        turns = self._branches[-1].turns
        turns[-1] = replace(turns[-1], reward=turns[-1].reward + reward)

    @property
    def total_reward(self) -> float:
        return sum(turn.reward for branch in self._branches for turn in branch.turns)

    def observed(self) -> list[str | None]:
        """The environment's words before each of :meth:`rows`; None before the first."""
        return [branch.observed for branch in self._branches if branch.turns] or [None]

    def rows(self) -> list[Row]:
        """The branches up to their last answers, or a single branch without turns before the first answer."""
        rows = [branch.row for branch in self._branches if branch.turns]
        return [_cut(row, row.turns[-1].end) for row in rows] or [self._branches[0].row]

    def _whole(self, new: Sequence[Message] = ()) -> str:
        messages = [*self._messages, *new]
        try:
            return self._encoder.chat(messages, add_generation_prompt=True, tools=self._tools)
        except Dropped as reason:
            raise UserError(
                f"the chat template cannot render an observation ({reason}): return messages that it can, a text or token ids"
            ) from reason


def _cut(row: Row, length: int) -> Row:
    return Row(row.tokens[:length], row.mask[:length], row.logprobs[:length], row.versions[:length], row.turns)
