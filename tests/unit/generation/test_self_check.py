"""Generators that change the bits of their samples are found out, and told by what."""

from collections.abc import Sequence

import pytest
import torch

from nemo_style_rlhf.generation.in_process import Finished, InProcessGenerator
from nemo_style_rlhf.generation.interface import GenerationRequest
from nemo_style_rlhf.generation.self_check import loses_bits

SEQUENCES = [[3, 4, 5, 6], [7, 8]]
ROUNDING = 1e-7


class Counter(InProcessGenerator):
    """Counts on from the prompt, a token a step; log-probabilities are 0 until that happens by which it ``loses`` bits.

    Its responses have as few tokens as they may.
    """

    def __init__(self, loses: str = "") -> None:
        super().__init__({})
        self._loses = loses
        self.queued: dict[str, GenerationRequest] = {}
        self.found: dict[str, list[int]] = {}
        self.lost: set[str] = set()

    def _add(self, name: str, request: GenerationRequest) -> None:
        decoded = [(*self.queued[other].prompt, *found) for other, found in self.found.items()]
        if self._loses == "cache" and any(each[:10] == request.prompt[:10] for each in decoded):
            self.lost.add(name)
        if self._loses == "prompt" and len(request.prompt) > 10:
            self.lost |= self.found.keys()
        if self._loses == "company" and self.found:
            self.lost.add(name)
        self.queued[name], self.found[name] = request, [request.prompt[-1] + 1]

    def _step(self) -> list[Finished]:
        ended = [
            Finished(name, torch.tensor(found), torch.full((len(found),), ROUNDING * (name in self.lost)), "length")
            for name, found in self.found.items() if len(found) == _fewest(self.queued[name])
        ]  # fmt: skip
        self._abort([finished.name for finished in ended])
        for found in self.found.values():
            found.append(found[-1] + 1)
        return ended

    def _abort(self, names: Sequence[str]) -> None:
        for name in names:
            del self.queued[name], self.found[name]

    def preempt(self) -> None:
        if self._loses == "preempted":
            self.lost |= self.found.keys()


def _fewest(request: GenerationRequest) -> int:
    return min(request.max_tokens, max(request.sampling.min_length or 0, 2))


def test_samples_that_depend_on_each_other_are_found_out() -> None:
    assert not loses_bits(Counter(), SEQUENCES, 0)
    assert loses_bits(Counter("company"), SEQUENCES, 0) == "what is sampled beside it"


@pytest.mark.parametrize(
    ("loses", "told"),
    [
        ("", ""),
        ("prompt", "a prompt that is read while it decodes"),
        ("preempted", "being preempted"),
        ("cache", "a prompt whose cache was filled by decoding"),
    ],
)
def test_a_long_sample_is_tried_out_in_every_way_that_the_clock_may_choose(loses: str, told: str) -> None:
    assert loses_bits(Counter(loses), SEQUENCES, 0, thorough=64) == told
    assert not loses_bits(Counter(loses), SEQUENCES, 0)  # a short one shows nothing
    assert not loses_bits(Counter(loses), SEQUENCES, 0, thorough=20)
