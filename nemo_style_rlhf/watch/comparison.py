"""The same prompts answered by several checkpoints: those of an evaluation, or two runs or steps of recorded rollouts."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.evaluation.samples import Sample, from_jsonl
from nemo_style_rlhf.evaluation.summary import summarize
from nemo_style_rlhf.watch.rollout_index import RolloutIndex
from nemo_style_rlhf.watch.run_files import read
from nemo_style_rlhf.watch.sample_queries import PATIENCE_S, step_samples

RESULTS = "results.jsonl"
RESULTS_BYTES = 2**30
LONGEST_TEXT = 20_000
"""Characters of a response; a link leads to the whole of it."""


@dataclass(frozen=True)
class Side:
    """The responses of one checkpoint."""

    name: str
    path: str
    samples: list[Sample]
    place: dict[str, Any] | None = None
    """The run and step of recorded rollouts, whose samples have a view of their own."""


@dataclass
class ComparedPrompt:
    """A prompt with the responses of every side."""

    id: int
    prompt: str
    label: str | None
    cells: list[list[Sample]]
    means: list[float | None] = field(default_factory=list)

    @property
    def scores(self) -> list[float]:
        return [sample.score for cell in self.cells for sample in cell if sample.score is not None]

    def difference(self, column: int) -> float | None:
        """Mean score minus the first side's."""
        mean, first = self.means[column], self.means[0]
        return None if mean is None or first is None else mean - first


def evaluation_sides(folder: Path) -> list[Side]:
    """The checkpoints of an evaluation, in their order.

    Raises:
        UserError: its files cannot be read.
    """
    path = folder / RESULTS
    try:
        return _evaluation_sides(path, path.stat().st_mtime_ns)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is no result of trainers/evaluate.py ({error}): run the evaluation again") from error


@lru_cache(maxsize=4)
def _evaluation_sides(path: Path, _changed: int) -> list[Side]:
    samples: dict[str, list[Sample]] = {}
    lines = read(path, path.parent, most=RESULTS_BYTES).decode().split("\n")
    for sample in from_jsonl(filter(None, lines)):
        samples.setdefault(sample.checkpoint, []).append(sample)
    if not samples:
        raise ValueError("it has no sample")
    told = {each["name"]: each["path"] for each in facts(path.parent).get("checkpoints", [])}
    names = sorted(samples, key=lambda name: list(told).index(name) if name in told else len(told))
    return [Side(name, told.get(name, ""), samples[name]) for name in names]


def facts(folder: Path) -> dict[str, Any]:
    """The summary that an evaluation has written; empty if there is none."""
    try:
        told = json.loads(read(folder / "summary.json", folder, most=RESULTS_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def rollout_side(index: RolloutIndex, run: str, step: int) -> Side:
    """A step of recorded rollouts, with rewards as scores."""
    samples = [
        Sample(
            prompt_id=row["prompt_id"],
            checkpoint=run,
            index=row["row"],
            seed=0,
            prompt=row["prompt"] or "",
            response=row["response"] or "",
            length=row["response_tokens"],
            finish_reason=row["finish_reason"],
            label=row["label"],
            score=row["reward"],
        )
        for row in step_samples(index, step)
    ]
    return Side(f"{run}, step {step}", "", samples, {"run": run, "step": step})


def newest_common_step(indexes: Sequence[RolloutIndex]) -> int:
    """The newest step that all runs have recorded; raises UserError if there is none."""
    common = set.intersection(*map(_recorded_steps, indexes))
    if not common:
        raise UserError("these runs have recorded no step in common: choose a step of each")
    return max(common)


def _recorded_steps(index: RolloutIndex) -> set[int]:
    index.refresh(PATIENCE_S)
    with index.cursor() as cursor:
        return {row[0] for row in cursor.execute("SELECT DISTINCT step FROM samples").fetchall()}


def rows_of(sides: Sequence[Side], *, same_prompts: bool) -> tuple[list[ComparedPrompt], list[Side], int]:
    """Match the prompts of all sides.

    Args:
        same_prompts: whether ``prompt_id`` means the same prompt on every side, as in one evaluation; otherwise the text counts.

    Returns:
        The prompts that every side has answered, the sides with no other prompts and numbered by row, and the number of prompts
            that only some sides have.
    """
    keys = [[sample.prompt_id if same_prompts else sample.prompt for sample in side.samples] for side in sides]
    common = set(keys[0]).intersection(*keys[1:])
    rows: dict[Any, ComparedPrompt] = {}
    for column, side in enumerate(sides):
        for key, sample in zip(keys[column], side.samples, strict=True):
            if key in common:
                row = rows.setdefault(
                    key, ComparedPrompt(sample.prompt_id, sample.prompt, sample.label, [[] for _ in sides])
                )
                row.cells[column].append(sample)
    ordered = sorted(rows.values(), key=lambda row: row.id)
    for row in ordered:
        row.means = [_mean([sample.score for sample in cell if sample.score is not None]) for cell in row.cells]
    left = [replace(side, samples=_numbered(ordered, column)) for column, side in enumerate(sides)]
    return ordered, left, len(set().union(*keys)) - len(common)


def _numbered(rows: Sequence[ComparedPrompt], column: int) -> list[Sample]:
    """Samples whose prompt and index mean the same on every side."""
    return [
        replace(sample, prompt_id=number, index=index)
        for number, row in enumerate(rows)
        for index, sample in enumerate(row.cells[column])
    ]


def summaries(sides: Sequence[Side]) -> list[dict[str, Any]]:
    first = sides[0]
    return [
        asdict(summarize(side.name, side.path, side.samples, None if side is first else first.samples))
        | {"place": side.place}
        for side in sides
        if side.samples
    ]


def ordered(rows: Sequence[ComparedPrompt], order: str) -> list[ComparedPrompt]:
    """Sort rows by ``order``.

    Args:
        order: ``file``; ``highest`` or ``lowest`` score of the first side first; ``above:K`` or ``below:K``: by the difference of
            side K, from 1, to the first.

    Raises:
        UserError: another order.
    """
    kind, _, column = order.partition(":")
    if kind == "file":
        return list(rows)
    columns = len(rows[0].cells) if rows else 0
    if kind in {"highest", "lowest"} and not column:
        values = {id(row): row.means[0] for row in rows}
    elif kind in {"above", "below"} and column.isdigit() and (not rows or 0 < int(column) < columns):
        values = {id(row): row.difference(int(column)) for row in rows}
    else:
        raise UserError(f"order={order} is no order: give file, highest, lowest, above:K or below:K with a side from 1")
    sign = -1 if kind in {"highest", "above"} else 1

    def key(row: ComparedPrompt) -> tuple[bool, float, int]:
        value = values[id(row)]
        return value is None, sign * (value or 0.0), row.id

    return sorted(rows, key=key)


def found(rows: Sequence[ComparedPrompt], text: str) -> tuple[list[ComparedPrompt], int]:
    """Rows whose prompt, label or responses hold ``text``, upper and lower case alike; and how often they do."""
    if not text:
        return list(rows), 0
    pattern = re.compile(re.escape(text), re.IGNORECASE)
    counts = [sum(len(pattern.findall(each)) for each in _texts(row)) for row in rows]
    return [row for row, count in zip(rows, counts, strict=True) if count], sum(counts)


def _texts(row: ComparedPrompt) -> list[str]:
    return [row.prompt, row.label or "", *(sample.response for cell in row.cells for sample in cell)]


def score_range(rows: Sequence[ComparedPrompt]) -> tuple[float, float] | None:
    """The scores between which colors run: few outliers must not make all others look alike."""
    scores = sorted(score for row in rows for score in row.scores)
    if not scores:
        return None
    return scores[int(len(scores) * 0.05)], scores[-(-len(scores) * 95 // 100) - 1]


def row_json(row: ComparedPrompt, sides: Sequence[Side]) -> dict[str, Any]:
    scores = row.scores
    best = max(scores) if scores and max(scores) > min(scores) else None
    return {
        "id": row.id,
        "prompt": row.prompt[:LONGEST_TEXT],
        "label": row.label,
        "means": row.means,
        "differences": [row.difference(column) for column in range(len(row.cells))],
        "cells": [
            [_cell(sample, best, side.place) for sample in cell] for cell, side in zip(row.cells, sides, strict=True)
        ],
    }


def _cell(sample: Sample, best: float | None, place: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "text": sample.response[:LONGEST_TEXT],
        "left_out": max(0, len(sample.response) - LONGEST_TEXT),
        "score": sample.score,
        "best": best is not None and sample.score == best,
        "tokens": sample.length,
        "truncated": sample.truncated,
        "sample": None if place is None else {**place, "row": sample.index},
    }


def _mean(numbers: Sequence[float]) -> float | None:
    return fmean(numbers) if numbers else None
