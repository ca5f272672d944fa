"""What reward functions and endpoints are given and may answer: OpenRLHF's contract, checked."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_style_rlhf.scoring.interface import RewardError, Scores, ScoringSample


def arguments(samples: Sequence[ScoringSample]) -> dict[str, list[Any]]:
    """``queries`` (prompt and response together), ``prompts`` and ``labels``."""
    return {
        "queries": [sample.prompt + sample.response for sample in samples],
        "prompts": [sample.prompt for sample in samples],
        "labels": [sample.label for sample in samples],
    }


def read_answer(answer: Any, count: int, source: str) -> Scores:
    """Rewards of ``count`` samples from a list, array, tensor, or a dict of ``rewards``, ``scores``, ``extra_logs``.

    Raises:
        RewardError: anything but ``count`` finite numbers under each name; the sentence says what came.
    """
    if not isinstance(answer, Mapping):
        answer = {"rewards": answer}
    if "rewards" not in answer:
        raise RewardError(f"{source} answered with the keys {sorted(map(str, answer))}, expected rewards among them")
    scores = answer.get("scores")
    extra = answer.get("extra_logs") or {}
    if not isinstance(extra, Mapping):
        raise RewardError(f"{source} answered with extra_logs of type {type(extra).__name__}, expected a dict")
    return Scores(
        rewards=_numbers(answer["rewards"], count, source, "rewards"),
        filter_scores=None if scores is None else _numbers(scores, count, source, "scores"),
        extra={str(name): _numbers(value, count, source, f"extra_logs[{name!r}]") for name, value in extra.items()},
    )


def _numbers(value: Any, count: int, source: str, what: str) -> Tensor:
    if isinstance(value, (str, bytes)):
        raise RewardError(f"{source} answered with a string as {what}, expected {count} numbers")
    try:
        tensor = torch.as_tensor(value, dtype=torch.float32).flatten()
    except (TypeError, ValueError, RuntimeError) as error:
        raise RewardError(
            f"{source} answered with {what} of type {type(value).__name__}, expected {count} numbers"
        ) from error
    if len(tensor) != count:
        raise RewardError(f"{source} answered with {len(tensor)} {what}, expected {count}: one for each query")
    for index, number in enumerate(tensor.tolist()):
        if not math.isfinite(number):
            raise RewardError(
                f"{source} answered with {number} as number {index + 1} of {what}, expected finite numbers"
            )
    return tensor
