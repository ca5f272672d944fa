"""Reads a model's files about its tokens. They are published together, and do not always agree."""

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def without_rows(tokenizer: "PreTrainedTokenizerBase", token: int, rows: int) -> str:
    """A sentence about a token of the data for which the model has no row."""
    return (
        f"the token {tokenizer.convert_ids_to_tokens(token)!r} (id {token}) has no row in the model's embedding of {rows} "
        f"(vocab_size in config.json), while the tokenizer has {len(tokenizer)} tokens: take the tokenizer that belongs to the "
        "model, or resize the embedding with transformers' resize_token_embeddings and save both"
    )


def _beside(tokenizer: "PreTrainedTokenizerBase", name: str) -> dict[str, Any]:
    """The object in a file next to the tokenizer; empty without one."""
    given: Any = None
    folder = getattr(tokenizer, "name_or_path", "")  # empty if it was made in memory
    with suppress(OSError, ValueError):
        given = json.loads((Path(folder) / name).read_bytes()) if folder else None
    return given if isinstance(given, dict) else {}


def rows_of(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Number of rows in the embedding of the tokenizer's model; None if no config.json gives it."""
    config = _beside(tokenizer, "config.json")
    inner = config.get("text_config")
    rows = (inner if isinstance(inner, dict) else config).get("vocab_size")
    return rows if isinstance(rows, int) else None


def stop_ids(tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """The ids at which a policy stops: the tokenizer's EOS, and the ids in generation_config.json next to it. Chat models end a
    turn with an id that only the latter has."""
    given = _beside(tokenizer, "generation_config.json").get("eos_token_id")
    ids = given if isinstance(given, list) else [given]
    return frozenset(token for token in [*ids, tokenizer.eos_token_id] if isinstance(token, int))
