"""Samples of a run on disk, token by token: Parquet files that any tool reads. Imports no torch.

``rollouts/step_000012.parquet`` holds the samples of one step, a row each. :func:`compact` merges ``BLOCK`` of these into
``rollouts/steps_000001_000050.parquet``, with a row group per step. A step file whose step lies within a merged file is a
leftover of a crash; readers skip it, and :func:`rewind` removes it.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nemo_style_rlhf.checkpoint.files import published, storage_errors
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.tracking.sample_files import SampleFile, sample_files

UNREADABLE = (pa.ArrowException, OSError, ValueError, KeyError, IndexError, TypeError)
"""Errors that a file may cause if it is not a whole recording."""
BLOCK = 50
"""Steps in a merged file."""
LARGEST = 2**30
"""Bytes of a merged file: large step files gain nothing from being merged."""
TOKENIZER_FILE = "tokenizer.json"
"""Next to the samples, in the format of the `tokenizers` library: for the texts of single tokens."""
KINDS = {"prompt_id": pa.int64(), "index": pa.int32(), "reward": pa.float32(), "failed": pa.bool_()}
"""Types of a sample's columns that are not text."""
TURNS = pa.list_(pa.struct([("start", pa.int32()), ("end", pa.int32()), ("finish_reason", pa.string())]))
Array = np.ndarray[Any, Any]


class DamagedFile(Exception):
    """A file in the folder of samples that cannot be read."""

    def __init__(self, path: Path, error: BaseException) -> None:
        super().__init__(path, error)
        self.path, self.error = path, error

    def set_aside(self) -> str:
        """Give the file a name that no reader looks for; returns the sentence that says so."""
        aside = self.path.with_name(f"damaged_{self.path.name}")
        self.path.rename(aside)
        said = " ".join(str(self.error).split())[:200]
        return f"{self.path} cannot be read ({said}): it is now {aside.name}, its samples are left out"


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise DamagedFile if reading ``path`` shows that it is not a recording."""
    try:
        yield
    except UNREADABLE as error:
        raise DamagedFile(path, error) from error


@dataclass
class StepSamples:
    """The samples of one step, B of N tokens in all, laid end to end as in :class:`rollout.types.Experience`.

    Arrays and plain lists are cheap to send to the process that writes them.
    """

    step: int
    lengths: list[int]
    """[B] tokens of prompt and response."""
    prompt_tokens: list[int]
    """[B] tokens before the first response token."""
    response_tokens: list[int]
    """[B] tokens that the policy produced."""
    turns: list[list[tuple[int, int, str]]]
    """[B] stretches of tokens that the policy produced, as (start, end, finish reason)."""
    tokens: Array
    """[N] int32."""
    per_sample: dict[str, Sequence[Any]]
    """Further columns, [B] each; numbers that a sample lacks are None."""
    scores: dict[str, Sequence[float | None]]
    """[B] each: rewards by source, and what the sources log; columns ``score/<name>``."""
    mask: Array
    """[N] bool, action-aligned: loss tokens."""
    weights_versions: Array
    """[N] int32, action-aligned."""
    per_token: dict[str, Array | None]
    """[N] float32 each, action-aligned; None if the run has no such quantity."""

    def responses(self) -> Iterator[list[int]]:
        """The tokens that the policy produced, sample by sample."""
        start = 0
        for length, turns in zip(self.lengths, self.turns, strict=True):
            yield [token for first, end, _ in turns for token in self.tokens[start + first : start + end].tolist()]
            start += length


def write_step(folder: Path, samples: StepSamples, responses: Sequence[str]) -> None:
    """Write the samples of a step to a file in ``folder``.

    Args:
        responses: [B] texts of the response tokens.

    Raises:
        StorageError: the disk refused the file.
    """
    rows = table(samples, responses)
    _write(_step_path(folder, samples.step), rows.schema, [rows])


def table(samples: StepSamples, responses: Sequence[str]) -> pa.Table:
    """A row for each sample, with its tokens as lists."""
    lengths, prompt_tokens = np.array(samples.lengths), np.array(samples.prompt_tokens)
    # Entry t describes the action that leads to token t+1, so the first of a response stands at its prompt's last token.
    ends = lengths.cumsum()
    place = np.arange(len(samples.tokens)) - np.repeat(ends - lengths, lengths)
    kept = (place >= np.repeat(prompt_tokens - 1, lengths)) & (place < np.repeat(lengths - 1, lengths))
    offsets = np.concatenate(([0], (lengths - prompt_tokens).cumsum())).astype(np.int32)
    mask = samples.mask[kept]
    per_token = {name: None if flat is None else flat[kept] for name, flat in samples.per_token.items()}

    def lists(flat: Array | None, kind: pa.DataType) -> pa.Array:
        if flat is None:
            return pa.nulls(len(lengths), pa.list_(kind))
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat, kind))

    columns = {
        "step": pa.array(np.full(len(lengths), samples.step, np.int32)),
        "row": pa.array(np.arange(len(lengths), dtype=np.int32)),
        **{name: pa.array(values, KINDS.get(name, pa.string())) for name, values in samples.per_sample.items()},
        "response": pa.array(responses, pa.string()),
        "prompt_tokens": pa.array(prompt_tokens, pa.int32()),
        "response_tokens": pa.array(samples.response_tokens, pa.int32()),
        "weights_version": pa.array(
            np.where(np.array(samples.response_tokens) > 0, samples.weights_versions[ends - 2], -1), pa.int32()
        ),
        "turns": pa.array(
            [[dict(zip(("start", "end", "finish_reason"), turn)) for turn in turns] for turns in samples.turns], TURNS
        ),
        **{f"score/{name}": pa.array(values, pa.float32()) for name, values in samples.scores.items()},
        **_summaries(per_token, mask, offsets),
        "tokens": pa.ListArray.from_arrays(
            pa.array(np.concatenate(([0], ends)).astype(np.int32)), pa.array(samples.tokens, pa.int32())
        ),
        "mask": lists(mask, pa.bool_()),
        "weights_versions": lists(samples.weights_versions[kept], pa.int32()),
        **{name: lists(flat, pa.float32()) for name, flat in per_token.items()},
    }
    return pa.table(columns)


def _summaries(per_token: Mapping[str, Array | None], mask: Array, offsets: Array) -> dict[str, pa.Array]:
    """Columns by which to sort samples: sums, means and extremes over the loss tokens; null for samples without one."""

    def reduced(reduce: np.ufunc, flat: Array) -> Array:
        """[B]; 0 for a sample without a response."""
        values, some = np.zeros(len(offsets) - 1), np.diff(offsets) > 0
        if some.any():  # reduceat takes an empty part for the element after it
            values[some] = reduce.reduceat(flat.astype(np.float64), offsets[:-1][some])
        return values

    counts = reduced(np.add, mask)

    def column(flat: Array | None, reduce: np.ufunc, *, mean: bool = False) -> pa.Array:
        if flat is None:
            return pa.nulls(len(counts), pa.float32())
        neutral = 0.0 if reduce is np.add else -np.inf
        values = reduced(reduce, np.where(mask, flat, neutral))
        with np.errstate(divide="ignore", invalid="ignore"):
            values = values / counts if mean else values
        return pa.array(values.astype(np.float32), pa.float32(), mask=counts == 0)

    kl, ratios = per_token["kl"], per_token["ratios"]
    sampler, policy = per_token["sampler_logprobs"], per_token["logprobs"]
    gap = None if sampler is None or policy is None else np.abs(sampler - policy)
    return {
        "learned_tokens": pa.array(counts, pa.int32()),
        "kl_sum": column(kl, np.add),
        "kl_mean": column(kl, np.add, mean=True),
        "kl_max": column(kl, np.maximum),
        "advantage_mean": column(per_token["advantages"], np.add, mean=True),
        "value_mean": column(per_token["values"], np.add, mean=True),
        "ratio_max": column(None if ratios is None else np.abs(ratios - 1), np.maximum),
        "sampler_gap_max": column(gap, np.maximum),
    }


def compact(folder: Path, keep: int) -> list[str]:
    """Merge old step files once ``2 * BLOCK`` lie there, and remove the oldest files that the newest ``keep`` recorded steps do
    not need; 0 keeps all. A file that is damaged is set aside, and the rest left to the next call.

    Returns:
        Warnings.

    Raises:
        StorageError: the disk refused the merged file.
    """
    try:
        _merge(folder)
        _forget(folder, keep)
    except DamagedFile as damaged:
        return [damaged.set_aside()]
    return []


def _merge(folder: Path) -> None:
    single = [file for file in sample_files(folder) if file.first == file.last]
    if len(single) < 2 * BLOCK or not (block := _block(single[:-BLOCK])):
        return
    schema = pa.schema([])
    for file in block:
        with _reading(file.path):
            schema = pa.unify_schemas([schema, pq.read_schema(file.path)])

    def tables() -> Iterator[pa.Table]:
        for file in block:
            with _reading(file.path):
                rows = pq.read_table(file.path)
            yield rows

    _write(_merged_path(folder, block[0].first, block[-1].last), schema, tables())
    for file in block:
        file.path.unlink()


def _forget(folder: Path, keep: int) -> None:
    files = sample_files(folder)
    if not keep or sum(map(_most_steps, files)) <= keep:
        return
    counts = []
    for file in files:
        with _reading(file.path):
            counts.append(1 if file.first == file.last else pq.read_metadata(file.path).num_row_groups)
    newer = sum(counts)
    for file, count in zip(files, counts):
        newer -= count
        if newer < keep:
            break
        file.path.unlink()


def _most_steps(file: SampleFile) -> int:
    return min(file.last - file.first + 1, BLOCK)


def _block(single: Sequence[SampleFile]) -> list[SampleFile]:
    """The oldest neighbors that make a file of at most ``LARGEST`` bytes; none if all are too large."""
    block: list[SampleFile] = []
    total = 0
    for file in single:
        size = file.path.stat().st_size
        if len(block) == BLOCK or total + size > LARGEST:
            if len(block) > 1:
                return block
            block, total = [], 0
        if size <= LARGEST:
            block.append(file)
            total += size
    return block if len(block) > 1 else []


def rewind(folder: Path, step: int) -> list[str]:
    """Remove leftovers of a crash, and the samples of steps after ``step``: these will be repeated.

    Returns:
        Warnings.

    Raises:
        StorageError: the disk refused a file.
    """
    warnings: list[str] = []
    kept = sample_files(folder)
    for path in {*folder.glob("step*.parquet*")} - {file.path for file in kept}:
        path.unlink()
    for file in kept:
        try:
            if file.first <= step < file.last:
                _shorten(folder, file, step)
        except DamagedFile as damaged:
            warnings.append(damaged.set_aside())
        else:
            if step < file.last:
                file.path.unlink()
    return warnings


def _shorten(folder: Path, file: SampleFile, step: int) -> None:
    """Write what ``file`` holds up to ``step`` into a file of its own."""
    with _reading(file.path):
        content = pq.ParquetFile(file.path)
        steps = [content.read_row_group(group, ["step"])["step"][0].as_py() for group in range(content.num_row_groups)]
        groups = [group for group, its in enumerate(steps) if its <= step]
        last = steps[groups[-1]]

    def tables() -> Iterator[pa.Table]:
        for group in groups:
            with _reading(file.path):
                rows = content.read_row_group(group)
            yield rows

    target = _step_path(folder, last) if len(groups) == 1 else _merged_path(folder, file.first, last)
    _write(target, content.schema_arrow, tables())


def _step_path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.parquet"


def _merged_path(folder: Path, first: int, last: int) -> Path:
    return folder / f"steps_{first:06d}_{last:06d}.parquet"


def _write(path: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    """Write a row group for each table; a score that a table lacks is null there."""
    with storage_errors(path), published(path) as beside, pq.ParquetWriter(
        beside, schema, compression="zstd", compression_level=1, use_dictionary=["prompt", "label", "finish_reason"]
    ) as writer:  # fmt: skip
        for rows in tables:
            columns = [
                rows[field.name] if field.name in rows.column_names else pa.nulls(len(rows), field.type)
                for field in schema
            ]
            writer.write_table(pa.table(columns, schema=schema), row_group_size=len(rows))


def read_rows(folder: Path, first: int = 0, last: int | None = None) -> Iterator[dict[str, Any]]:
    """The samples of steps ``first`` to ``last``, one at a time, as plain values that JSON can hold. Files may be merged and
    removed meanwhile."""
    step = first
    while file := _next_file(folder, step, last):
        with suppress(FileNotFoundError):
            content = pq.ParquetFile(file.path)
            for number in range(content.num_row_groups):
                for row in content.read_row_group(number).to_pylist():
                    if step <= row["step"] and (last is None or row["step"] <= last):
                        yield {name: _plain(value) for name, value in row.items()}
            step = file.last + 1


def _next_file(folder: Path, step: int, last: int | None) -> SampleFile | None:
    files = (file for file in sample_files(folder) if file.last >= step)
    return next((file for file in files if last is None or file.first <= last), None)


def _plain(value: Any) -> Any:
    """Replace infinity and NaN by None: JSON lacks them."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def jsonl(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def print_jsonl(run: Path, first: int, last: int | None, *, tokens: bool) -> None:
    """Print the samples of a run as JSON Lines.

    Args:
        tokens: also print the columns with an entry for each token.

    Raises:
        UserError: the run has no samples.
    """
    folders = [run / "rollouts", run / "actor" / "rollouts", run]
    folder = next((folder for folder in folders if sample_files(folder)), None)
    if folder is None:
        raise UserError(
            f"{run} holds no rollouts: give the run.output_dir of a PPO run with tracking.rollouts.every above 0"
        )
    for row in read_rows(folder, first, last):
        sys.stdout.write(jsonl({name: value for name, value in row.items() if tokens or not isinstance(value, list)}))
