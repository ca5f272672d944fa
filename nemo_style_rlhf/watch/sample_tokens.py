"""One sample as its view shows it: its numbers, and its tokens with theirs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from nemo_style_rlhf.watch.tokens import LONGEST_CHARACTER, special_tokens, texts_of

NUMBERS = ("sampler_logprobs", "logprobs", "ref_logprobs", "values", "rewards", "kl", "advantages", "returns", "ratios")
LISTS = {*NUMBERS, "tokens", "mask", "weights_versions"}
MOST_TOKENS = 4000
"""Tokens at once; a browser lays out this many elements without a noticeable pause."""
OUTLIERS = 0.02
"""Share of tokens at either end that a color scale does not stretch for."""


def sample_json(row: Mapping[str, Any], tokenizer: Tokenizer | None, first: int, count: int) -> dict[str, Any]:
    """One sample as the page's JSON.

    Args:
        row: every column of the sample.
        tokenizer: None if the run has none: tokens then have no text.
        first: the first token to show, in prompt and response.
        count: how many tokens.
    """
    ids: list[int] = row["tokens"] or []
    prompt = row["prompt_tokens"]
    first = min(max(first, 0), len(ids))
    end = min(first + min(max(count, 1), MOST_TOKENS), len(ids))
    mask = [bool(each) for each in row["mask"] or []]
    lists = {name: _learned(values, mask) for name, values in _numbers(row).items()}
    special = special_tokens(tokenizer) if tokenizer else set()
    return {
        "sample": {name: value for name, value in row.items() if name not in LISTS},
        "first": first,
        "total": len(ids),
        "ids": ids[first:end],
        "texts": None if tokenizer is None else _texts(tokenizer, ids, first, end),
        "special": [token in special for token in ids[first:end]],
        "mask": _from_prompt(mask, False, first, end, prompt),
        "weights_versions": _from_prompt(row["weights_versions"] or [], None, first, end, prompt),
        "numbers": {name: _from_prompt(values, None, first, end, prompt) for name, values in lists.items()},
        "ranges": {name: value_range(values) for name, values in lists.items()},
    }


def value_range(values: Sequence[float | None]) -> list[float] | None:
    """The range of values for the colors; None if there is no value."""
    there = sorted(value for value in values if value is not None)
    if not there:
        return None
    outside = int(len(there) * OUTLIERS)
    return [there[outside], there[-1 - outside]]


def _numbers(row: Mapping[str, Any]) -> dict[str, Sequence[float | None]]:
    """The lists that the run has recorded, with the sampler's distance from the trainer's log-probabilities."""
    lists: dict[str, Sequence[float | None]] = {name: row[name] for name in NUMBERS if row.get(name) is not None}
    if "logprobs" in lists and "sampler_logprobs" in lists:
        pairs = zip(lists["logprobs"], lists["sampler_logprobs"], strict=True)
        lists["sampler_gap"] = [None if ours is None or theirs is None else ours - theirs for ours, theirs in pairs]
    return lists


def _learned(values: Sequence[float | None], mask: Sequence[bool]) -> list[float | None]:
    """Values of loss tokens. Other tokens' values mean nothing, nor does NaN."""
    pairs = zip(values, mask, strict=True)
    return [value if learned and value is not None and math.isfinite(value) else None for value, learned in pairs]


def _from_prompt(values: Sequence[Any], missing: Any, first: int, end: int, prompt: int) -> list[Any]:
    """Entries for tokens ``first`` to ``end`` of a list that begins after the prompt."""
    before = [missing] * (min(end, prompt) - first)
    return [*before, *values[max(first - prompt, 0) : max(end - prompt, 0)]]


def _texts(tokenizer: Tokenizer, ids: Sequence[int], first: int, end: int) -> list[str | None]:
    """Decode tokens with their neighbors: a character may begin or end in these."""
    start = max(first - 2 * LONGEST_CHARACTER, 0)
    return texts_of(tokenizer, ids[start : end + LONGEST_CHARACTER])[first - start : end - start]
