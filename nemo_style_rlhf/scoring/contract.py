"""Arguments and answers of reward functions and endpoints: OpenRLHF's contract, checked."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_style_rlhf.scoring.interface import RewardError, Scores, ScoringSample

SHOWN = 60
"""Maximum number of characters of a wrong answer that an error quotes."""


def arguments(samples: Sequence[ScoringSample]) -> dict[str, list[Any]]:
    """``queries`` (prompt and response together), ``prompts`` and ``labels``."""
    return {
        "queries": [sample.prompt + sample.response for sample in samples],
        "prompts": [sample.prompt for sample in samples],
        "labels": [sample.label for sample in samples],
    }


def read_answer(answer: Any, count: int, source: str) -> Scores:
    """Read rewards of ``count`` samples from a list, array, tensor, or a dict of ``rewards``, ``scores``, ``extra_logs``.

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
            f"{source} answered with extra_logs={_short(extra)}, expected a dict of numbers: correct what it returns"
        )
    return Scores(
        rewards=_numbers(answer["rewards"], count, source, "rewards"),
        filter_scores=None if scores is None else _numbers(scores, count, source, "scores"),
        extra={
            str(name): _numbers(value, count, source, f"extra_logs[{name!r}]") for name, value in (extra or {}).items()
        },
    )


def _numbers(value: Any, count: int, source: str, what: str) -> Tensor:
    expected = f"expected {count} numbers, one for each query: correct what it returns"
    try:
        tensor = torch.as_tensor(value, dtype=torch.float32).flatten()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise RewardError(f"{source} answered with {what}={_short(value)}, {expected}") from error
    if len(tensor) != count:
        raise RewardError(f"{source} answered with {len(tensor)} {what}, {expected}")
    for index, number in enumerate(tensor.tolist()):
        if not math.isfinite(number):
            raise RewardError(
                f"{source} answered with {number} as number {index + 1} of {what}, expected finite numbers: "
                "correct what it returns"
            )
    return tensor


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."
