"""Samples of an evaluation, and the file that holds them."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_style_rlhf.schema.chat import Chat


@dataclass
class Sample:
    """One response of one checkpoint."""

    prompt_id: int
    """Row number in the prompts' file."""
    checkpoint: str
    index: int
    """Number among the checkpoint's responses to this prompt, from 0."""
    seed: int
    """0 if it is not known."""
    prompt: str
    response: str
    """Text without special tokens."""
    length: int
    """Length in tokens, including an end-of-sequence token."""
    finish_reason: str
    """``stop`` or ``length`` (truncated)."""
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The other fields of the prompt's row, for reward functions."""
    chat: Chat | None = None
    """The conversation of which a chat template made ``prompt``."""
    score: float | None = None
    """None if no source gives scores, or the sources failed on this sample."""
    extra: dict[str, float] = field(default_factory=dict)
    """Further metrics from the reward sources."""
    token_ids: tuple[int, ...] = ()
    """Token ids of prompt and response, for reward sources."""

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


def to_jsonl(samples: list[Sample]) -> str:
    """One object per line. Empty fields are left out, but a missing score is null."""
    return "".join(json.dumps(_row(sample), ensure_ascii=False) + "\n" for sample in samples)


def _row(sample: Sample) -> dict[str, Any]:
    optional = {name: value for name in ("label", "extra") if (value := getattr(sample, name))}
    return {
        "prompt_id": sample.prompt_id,
        "checkpoint": sample.checkpoint,
        "sample": sample.index,
        "seed": sample.seed,
        "prompt": sample.prompt,
        "response": sample.response,
        "score": sample.score,
        "length": sample.length,
        "finish_reason": sample.finish_reason,
        **optional,
    }


def from_jsonl(lines: Iterable[str]) -> Iterator[Sample]:
    """The samples that :func:`to_jsonl` has written, without the fields that it leaves out."""
    for line in lines:
        row = json.loads(line)
        yield Sample(
            prompt_id=row["prompt_id"],
            checkpoint=row["checkpoint"],
            index=row["sample"],
            seed=row["seed"],
            prompt=row["prompt"],
            response=row["response"],
            length=row["length"],
            finish_reason=row["finish_reason"],
            label=row.get("label"),
            score=row["score"],
            extra=row.get("extra", {}),
        )
