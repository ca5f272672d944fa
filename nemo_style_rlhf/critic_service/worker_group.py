"""One service over several ranks: the first answers requests, and every rank handles the messages of the first.

A message is a frozen dataclass that holds everything its rank needs. Nothing else reaches the rank.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from nemo_style_rlhf.checkpoint.files import STORAGE_ERRORS, storage_failure
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.engine.engine import NonFiniteError

LOGGER = logging.getLogger(__name__)

Result = TypeVar("Result")


class OutOfStep(Exception):
    """This rank has left a message that the others still handle: the process must end."""


class RankMessage(Generic[Result]):
    """Base of the messages; ``Result`` is the type that a handler returns."""


class WorkerGroup(Ranks):
    """Ranks that handle the messages of the first."""

    def __init__(self) -> None:
        super().__init__()
        self._handlers: dict[type[RankMessage[Any]], Callable[[Any], Any]] = {}

    def join(self, handlers: Mapping[type[RankMessage[Any]], Callable[[Any], Any]]) -> None:
        """Add a member that handles messages of these types. Every rank has the same members."""
        self._handlers |= handlers

    def run(self, message: RankMessage[Result]) -> Result:
        """On the first rank: make every rank handle ``message``, and return this rank's result. Raises as :meth:`run_each`."""
        return self._send([message] * self.size, gathers=False)

    def run_each(self, messages: Sequence[RankMessage[Result]]) -> list[Result]:
        """On the first rank: make each rank handle its own of ``messages``, all of one type, and return the results in order.

        Raises:
            TypeError: no member handles such a message; it was not sent.
            OutOfStep: the disk refused while other ranks handle the message, too.
        """
        return self.gather(self._send(messages, gathers=True))

    def _send(self, messages: Sequence[RankMessage[Result]], *, gathers: bool) -> Result:
        handled = type(messages[0])
        if handled not in self._handlers:
            raise TypeError(f"no member of the worker group handles {handled.__name__}")
        own, _ = self.scatter([(message, gathers) for message in messages])
        try:
            result: Result = self._handlers[handled](own)
        except STORAGE_ERRORS as error:
            if self.size > 1 and (reason := storage_failure(error)):
                raise OutOfStep(f"the disk refused ({reason}) in the middle of a call of {self.size} ranks") from error
            raise
        return result

    def dismiss(self) -> None:
        """On the first rank: let :meth:`follow` return."""
        self.scatter([None] * self.size)

    def follow(self) -> None:
        """On the other ranks: handle the first rank's messages until it dismisses them.

        Raises:
            RuntimeError: the first rank is gone.
        """
        while (sent := self.scatter(None)) is not None:
            message, gathers = sent
            try:
                result = self._handlers[type(message)](message)
                if gathers:
                    self.gather(result)
            except NonFiniteError as error:  # the first rank gets it, too, answers, and ends all ranks
                LOGGER.error("%s", error)
