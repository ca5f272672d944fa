"""Rollouts as training records them: Parquet files of steps, and the tokenizer beside them."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_FLOATS = pa.list_(pa.float32())
TOKEN_LISTS = (
    "sampler_logprobs", "logprobs", "ref_logprobs", "values", "rewards", "kl", "advantages", "returns", "ratios",
)  # fmt: skip
SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("row", pa.int32()),
        ("prompt_id", pa.int64()),
        ("index", pa.int32()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("label", pa.string()),
        ("finish_reason", pa.string()),
        ("failed", pa.bool_()),
        ("reward", pa.float32()),
        ("response_tokens", pa.int32()),
        ("prompt_tokens", pa.int32()),
        ("turns", pa.list_(pa.struct([("start", pa.int32()), ("end", pa.int32()), ("finish_reason", pa.string())]))),
        ("weights_version", pa.int32()),
        *(
            (name, pa.float32())
            for name in ("kl_sum", "kl_mean", "kl_max", "advantage_mean", "value_mean", "ratio_max")
        ),
        ("sampler_gap_max", pa.float32()),
        ("learned_tokens", pa.int32()),
        ("tokens", pa.list_(pa.int32())),
        ("mask", pa.list_(pa.bool_())),
        ("weights_versions", pa.list_(pa.int32())),
        *((name, _FLOATS) for name in TOKEN_LISTS),
    ]
)


BYTES = 256
END = BYTES
"""Id of the end-of-sequence token."""


def byte_tokenizer() -> Tokenizer:
    """A token per byte of UTF-8, and one more that ends a response."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


def sample_row(step: int, row: int, prompt: str, response: str, **given: Any) -> dict[str, Any]:
    """A sample whose numbers all say which token they belong to: entry k of ``kl`` is k / 100; no critic, no reference model."""
    tokenizer = byte_tokenizer()
    before, after = tokenizer.encode(prompt).ids, [*tokenizer.encode(response).ids, END]
    mask = given.get("mask", [True] * len(after))
    learned = [0.01 * place if each else math.nan for place, each in enumerate(mask)]
    return {
        "step": step,
        "row": row,
        "prompt_id": 0,
        "index": row,
        "prompt": prompt,
        "response": response,
        "finish_reason": "stop",
        "failed": False,
        "reward": float(row),
        "response_tokens": len(after),
        "prompt_tokens": len(before),
        "turns": [{"start": len(before), "end": len(before) + len(after), "finish_reason": "stop"}],
        "weights_version": step - 1,
        "kl_max": max(value for value in learned if value == value),
        "kl_mean": 0.5,
        "learned_tokens": sum(mask),
        "tokens": [*before, *after],
        "mask": mask,
        "weights_versions": [step - 1] * len(after),
        "kl": learned,
        "advantages": [value - 0.05 for value in learned],
        "logprobs": [-value for value in learned],
        "sampler_logprobs": [-value - 0.25 for value in learned],
        **given,
    }


def schema_with(scores: Sequence[str]) -> pa.Schema:
    """The schema with columns ``score/<name>`` after ``reward``."""
    fields = list(SCHEMA)
    place = SCHEMA.get_field_index("reward") + 1
    return pa.schema([*fields[:place], *(pa.field(f"score/{name}", pa.float32()) for name in scores), *fields[place:]])


def table_of(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """A table of the schema; keys that a row does not have are null."""
    scores = sorted({key.removeprefix("score/") for row in rows for key in row if key.startswith("score/")})
    return pa.Table.from_pylist([dict(row) for row in rows], schema=schema_with(scores))


def write_step(folder: Path, step: int, table: pa.Table) -> Path:
    return _write(folder / f"step_{step:06d}.parquet", [table])


def write_compacted(folder: Path, first: int, last: int, tables: Sequence[pa.Table]) -> Path:
    """One file of several steps, with a row group per step."""
    return _write(folder / f"steps_{first:06d}_{last:06d}.parquet", tables)


def _write(path: Path, tables: Sequence[pa.Table]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.tmp")
    with pq.ParquetWriter(beside, tables[0].schema, compression="zstd", compression_level=1) as writer:
        for table in tables:
            writer.write_table(table.cast(tables[0].schema), row_group_size=max(1, table.num_rows))
    beside.rename(path)
    return path
