"""One service over several ranks: the first answers requests, and every call on the models is made on all of them."""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from nemo_style_rlhf.checkpoint.files import STORAGE_ERRORS, storage_failure
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.engine.engine import NonFiniteError

LOGGER = logging.getLogger(__name__)

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class OutOfStep(Exception):
    """This rank has left a call that the others are still in: the process cannot go on."""


class Crew(Ranks):
    """Ranks of which the others do what the first does."""

    def __init__(self) -> None:
        super().__init__()
        self._members: list[Any] = []

    def join(self, member: Any) -> None:
        """``member`` has methods :func:`on_all_ranks`; each rank lets its members join in the same order."""
        self._members.append(member)

    def tell(self, member: Any, method: str, arguments: Sequence[Any]) -> None:
        """On the first rank: have the others call it, too."""
        self.from_first((self._members.index(member), method, arguments))

    def dismiss(self) -> None:
        """On the first rank: let :meth:`follow` return."""
        self.from_first(None)

    def follow(self) -> None:
        """On the others: do what the first rank does, until it dismisses them.

        Raises:
            RuntimeError: the first rank is gone.
        """
        while (told := self.from_first(None)) is not None:
            index, method, arguments = told
            member = self._members[index]
            try:
                getattr(type(member), method).__wrapped__(member, *arguments)
            except NonFiniteError as error:  # the first rank has it, too: it answers, and ends all
                LOGGER.error("%s", error)


class Member(Protocol):
    crew: Crew


AnyMember = TypeVar("AnyMember", bound=Member)


def on_all_ranks(
    method: Callable[Concatenate[AnyMember, Arguments], Result],
) -> Callable[Concatenate[AnyMember, Arguments], Result]:
    """A method that, called on the first rank, runs on all; its positional arguments go there, keywords stay behind."""

    @functools.wraps(method)
    def everywhere(self: AnyMember, *arguments: Arguments.args, **local: Arguments.kwargs) -> Result:
        self.crew.tell(self, method.__name__, arguments)
        try:
            return method(self, *arguments, **local)
        except STORAGE_ERRORS as error:
            if self.crew.size > 1 and (reason := storage_failure(error)):
                raise OutOfStep(
                    f"the disk refused ({reason}) in the middle of a call of {self.crew.size} ranks"
                ) from error
            raise

    return everywhere
