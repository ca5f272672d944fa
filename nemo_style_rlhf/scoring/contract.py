"""Arguments and answers of reward functions and endpoints: OpenRLHF's contract, checked."""

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.scoring.interface import RewardError, Scores, ScoringSample, quoted

OPENRLHF = ("queries", "prompts", "labels")
"""The arguments of OpenRLHF's contract."""
ARGUMENTS: dict[str, Callable[[ScoringSample], Any]] = {
    "queries": lambda sample: sample.prompt + sample.response,
    "prompts": lambda sample: sample.prompt,
    "completions": lambda sample: sample.response,
    "labels": lambda sample: sample.label,
    "turns": lambda sample: sample.turns,
}
"""OpenRLHF's arguments; `completions`, TRL's name for the responses; and the turns of an episode."""


def arguments(samples: Sequence[ScoringSample], names: Sequence[str] = OPENRLHF) -> dict[str, list[Any]]:
    """One list for each of ``names``: an argument's values, or a column's values in the rows; None where a row lacks it."""
    return {
        name: [ARGUMENTS[name](sample) if name in ARGUMENTS else sample.metadata.get(name) for sample in samples]
        for name in names
    }


def columns(rows: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Names of the fields that occur in any of the rows."""
    return frozenset().union(*rows)


def requested(function: Callable[..., Any], there: Collection[str], source: str) -> list[str]:
    """The names that the signature of ``function`` asks for; ``**kwargs`` asks for all.

    Args:
        there: the :func:`columns` of the rows. A column with an argument's name is not passed.

    Raises:
        UserError: a parameter without a default is neither an argument nor a column, or cannot be given by name.
    """
    known = [*ARGUMENTS, *sorted(set(there) - set(ARGUMENTS))]
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some functions written in C have none
        return list(OPENRLHF)
    by_name = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    for each in parameters:
        if each.kind is each.POSITIONAL_ONLY and each.default is each.empty:
            raise UserError(
                f"{source} takes {each.name} by position, but arguments are given by name: remove the / after it"
            )
    missing = [each.name for each in by_name if each.default is each.empty and each.name not in known]
    if missing:
        raise UserError(
            f"{source} asks for {', '.join(missing)}, which no row has: it may ask for {', '.join(known)}; rename the parameter, "
            "or give it a default"
        )
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return known
    return [each.name for each in by_name if each.name in known]


def read_answer(answer: Any, count: int, source: str) -> Scores:
    """Read rewards of ``count`` samples from a list, array, tensor, or a dict of ``rewards``, ``scores``, ``extra_logs``.

    A single number in ``extra_logs`` is a metric of the whole group: every sample gets it.

    Raises:
        RewardError: a name does not hold ``count`` finite numbers; the sentence quotes the answer.
    """
    if not isinstance(answer, Mapping):
        answer = {"rewards": answer}
    if "rewards" not in answer:
        raise RewardError(
            f"{source} answered with the keys {sorted(map(str, answer))}, expected rewards among them: correct what it returns"
        )
    scores = answer.get("scores")
    extra = answer.get("extra_logs")
    if not isinstance(extra, Mapping | None):
        raise RewardError(
            f"{source} answered with extra_logs={quoted(extra)}, expected a dict of numbers: correct what it returns"
        )
    return Scores(
        rewards=_numbers(answer["rewards"], count, source, "rewards"),
        filter_scores=None if scores is None else _numbers(scores, count, source, "scores"),
        extra={
            str(name): _numbers(value, count, source, f"extra_logs[{name!r}]", for_all=True)
            for name, value in (extra or {}).items()
        },
    )


def _numbers(value: Any, count: int, source: str, what: str, *, for_all: bool = False) -> Tensor:
    alternative = ", or one for all" if for_all else ""
    expected = f"expected {count} numbers, one for each query{alternative}: correct what it returns"
    try:
        tensor = torch.as_tensor(value, dtype=torch.float32)
        tensor = tensor.repeat(count) if for_all and tensor.ndim == 0 else tensor.flatten()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise RewardError(f"{source} answered with {what}={quoted(value)}, {expected}") from error
    if len(tensor) != count:
        raise RewardError(f"{source} answered with {len(tensor)} {what}, {expected}")
    for index, number in enumerate(tensor.tolist()):
        if not math.isfinite(number):
            raise RewardError(
                f"{source} answered with {number} as number {index + 1} of {what}, expected finite numbers: "
                "correct what it returns"
            )
    return tensor
