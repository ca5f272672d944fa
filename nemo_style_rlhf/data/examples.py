"""Tokenized rows of the supervised stages."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SFTExample:
    """One text to imitate."""

    token_ids: list[int]
    prompt_length: int
    """Number of tokens at the beginning that are not loss tokens; 0 in plain text."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_loss_tokens(self) -> int:
        return len(self) - max(self.prompt_length, 1)

    def learned(self) -> list[bool]:
        """True for each loss token. The first token never is one, since no token before it predicts it."""
        return [position >= max(self.prompt_length, 1) for position in range(len(self))]


@dataclass(frozen=True)
class Conversation(SFTExample):
    """Several answers, with text between them that has no loss tokens."""

    read: list[tuple[int, int]]
    """Begin and end of each such text, as token positions."""

    @property
    def num_loss_tokens(self) -> int:
        return super().num_loss_tokens - sum(end - start for start, end in self.read)

    def learned(self) -> list[bool]:
        learned = super().learned()
        for start, end in self.read:
            learned[start:end] = [False] * (end - start)
        return learned


@dataclass(frozen=True)
class PreferencePair:
    """Two answers to one prompt, prompt included in both."""

    chosen: list[int]
    rejected: list[int]
    margin: float = 0.0
    prompt_length: int = 0
    """Number of tokens of the prompt, at the beginning of both."""
    subset: str = ""
    """The row's subset, by which evaluations are split."""

    def __len__(self) -> int:
        return max(len(self.chosen), len(self.rejected))


@dataclass(frozen=True)
class UnpairedExample(SFTExample):
    """One answer to a prompt, judged by itself."""

    desirable: bool
