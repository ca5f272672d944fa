"""Pages of samples, groups and prompts of a run, and one sample with its tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import duckdb

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.watch.rollout_files import READ, escaped, list_files, quoted
from nemo_style_rlhf.watch.rollout_index import RolloutIndex
from nemo_style_rlhf.watch.sample_tokens import LISTS

PATIENCE_S = 0.1
"""Seconds that a page waits for files that are being read; it says how many are missing."""
EXCERPT = 300
"""Characters of a text in a page of many."""
LONGEST_TEXT = 200_000
"""Characters of a text where it is shown in full; megabytes would stop the browser."""
LARGEST_PAGE = 200
TRIES = 3
TEXTS = ("prompt", "response", "label")
COMPARISONS = {"eq": "=", "ne": "<>", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
Result = TypeVar("Result")
Row = dict[str, Any]

GROUP = """SELECT step, prompt_id, count(*) AS samples, avg(reward) AS reward_mean, min(reward) AS reward_min,
    max(reward) AS reward_max, stddev_pop(reward) AS reward_spread, {extra}
    count(*) FILTER (WHERE finish_reason = 'length') AS truncated, count(*) FILTER (WHERE failed) AS failed
    FROM chosen GROUP BY step, prompt_id"""
PROMPT = """SELECT prompt_id, count(*) AS steps, min(step) AS first_step, max(step) AS last_step,
    CAST(sum(samples) AS BIGINT) AS samples, avg(reward_mean) AS reward_mean, arg_min(reward_mean, step) AS reward_first,
    arg_max(reward_mean, step) AS reward_last,
    arg_max(reward_mean, step) - arg_min(reward_mean, step) AS reward_change, CAST(sum(truncated) AS BIGINT) AS truncated,
    CAST(sum(failed) AS BIGINT) AS failed FROM ({groups}) GROUP BY prompt_id"""


@dataclass(frozen=True)
class Filter:
    """A condition on a column: ``reward:lt:0.5``, ``failed:eq:true``, ``reward:is:null``, ``reward:is:given``."""

    column: str
    comparison: str
    value: str

    @classmethod
    def parse(cls, text: str) -> "Filter":
        """Parse ``column:comparison:value``; raises UserError if it has another form."""
        parts = text.rsplit(":", 2)
        if (
            len(parts) != 3
            or parts[1] not in {*COMPARISONS, "is"}
            or (parts[1] == "is" and parts[2] not in {"null", "given"})
        ):
            raise UserError(
                f"filter={text} is no filter: give COLUMN:COMPARISON:VALUE with one of {', '.join(COMPARISONS)}, or "
                "COLUMN:is:null or COLUMN:is:given"
            )
        return cls(*parts)

    def condition(self, kinds: Mapping[str, str]) -> tuple[str, list[str]]:
        """The condition in SQL, and the values of its parameters.

        Raises:
            UserError: no such column, or the value does not fit it.
        """
        kind = require_column(self.column, kinds)
        if self.comparison == "is":
            return f"{quoted(self.column)} IS {'NULL' if self.value == 'null' else 'NOT NULL'}", []
        return f"{quoted(self.column)} {COMPARISONS[self.comparison]} CAST(? AS {kind})", [self.value]


@dataclass(frozen=True)
class Query:
    """A selection of samples, their order, and the part to show."""

    filters: tuple[Filter, ...] = ()
    sort: str = ""
    """A column; empty for the newest step first."""
    descending: bool = True
    by: str = "sample"
    """``sample``, ``group`` (a prompt in a step) or ``prompt`` (over all steps)."""
    offset: int = 0
    limit: int = 50


def page(index: RolloutIndex, query: Query, *, texts: bool = True) -> dict[str, Any]:
    """Rows of a page with excerpts of their texts, the columns, and totals over all that the filters let through.

    Raises:
        UserError: no such column, a value that does not fit it, or no such kind of row.
    """
    read, listed = index.refresh(PATIENCE_S)
    kinds = index.columns()
    query = query if query.sort else replace(query, sort="last_step" if query.by == "prompt" else "step")
    relation, values = _relation(query, kinds)
    with index.cursor() as cursor:
        columns = _columns(cursor, relation, values)
        require_column(query.sort, columns)
        limit = min(max(query.limit, 1), LARGEST_PAGE)
        part = f"ORDER BY {_order(query, columns)} LIMIT {limit} OFFSET {max(query.offset, 0)}"
        rows = _rows(cursor, _page_of(query, relation, part), values)
        total = cursor.execute(f"SELECT count(*) FROM ({relation})", values).fetchall()[0][0]
        totals = _totals(cursor, query, kinds)
    if texts:
        _add_texts(index, rows, kinds)
    for row in rows:
        row.pop("file", None)
    columns.pop("file", None)
    return {
        "columns": [{"name": name, "kind": kind} for name, kind in columns.items()],
        "sample_columns": [{"name": name, "kind": kind} for name, kind in kinds.items()],
        "rows": rows,
        "total": total,
        "totals": totals,
        "damaged": index.damaged,
        "files_read": read,
        "files": listed,
    }


def group(index: RolloutIndex, step: int, prompt_id: int) -> list[Row]:
    """All samples of a prompt in a step, with their texts, in the order of the step."""
    return _of_step(index, step, "AND prompt_id = ?", [prompt_id])


def step_samples(index: RolloutIndex, step: int) -> list[Row]:
    """All samples of a step, with their texts."""
    return _of_step(index, step, "", [])


def history(index: RolloutIndex, prompt_id: int, offset: int, limit: int) -> dict[str, Any]:
    """The answers to a prompt over the steps: the steps with their rewards, and the samples of some of them, newest first."""
    read, listed = index.refresh(PATIENCE_S)
    with index.cursor() as cursor:
        steps = _rows(
            cursor,
            "SELECT step, count(*) AS samples, avg(reward) AS reward_mean, min(reward) AS reward_min, max(reward) AS reward_max "
            "FROM samples WHERE prompt_id = ? GROUP BY step ORDER BY step",
            [prompt_id],
        )
    shown = [row["step"] for row in steps[::-1][offset : offset + min(limit, LARGEST_PAGE)]]
    where = "prompt_id = ? AND step IN (SELECT unnest(?)) ORDER BY step DESC, row"
    samples = _samples_with_texts(index, where, [prompt_id, shown])
    prompt = samples[0]["prompt"] if samples else None
    return {"steps": steps, "samples": samples, "prompt": prompt, "files_read": read, "files": listed}


def sample(index: RolloutIndex, step: int, row: int) -> Row:
    """Every column of one sample, with its lists.

    Raises:
        UserError: the sample does not exist (any more).
    """
    found = read_files(index, lambda cursor: _read_step(cursor, index.folder, "*", step, "AND row = ?", [row]))
    if not found:
        raise UserError(
            f"sample {row} of step {step} is not recorded (any more): look at the steps in the table of rollouts"
        )
    return found[0] | {name: None if found[0][name] is None else found[0][name][:LONGEST_TEXT] for name in TEXTS}


def _of_step(index: RolloutIndex, step: int, where: str, values: list[Any]) -> list[Row]:
    """Samples of a step with their texts, from its file: the index may not know it yet."""
    texts = ", ".join(f"left({name}, {LONGEST_TEXT}) AS {name}" for name in TEXTS)
    left_out = ", ".join(f"'{name}'" for name in (*sorted(LISTS), *TEXTS, "turns"))
    columns = f"COLUMNS(lambda name: name NOT IN ({left_out})), {texts}, length(response) AS response_length"
    return read_files(index, lambda cursor: _read_step(cursor, index.folder, columns, step, where, values))


def _read_step(
    cursor: duckdb.DuckDBPyConnection, folder: Path, columns: str, step: int, where: str, values: list[Any]
) -> list[Row]:
    paths = [file.path for file in list_files(folder) if file.first <= step <= file.last]
    if not paths:
        return []
    # The condition on the step skips all row groups but one.
    selected = f"SELECT {columns} FROM {READ} WHERE step = ? {where} ORDER BY row"
    return _rows(cursor, selected, [escaped(paths), step, *values])


def read_files(index: RolloutIndex, read: Callable[[duckdb.DuckDBPyConnection], Result]) -> Result:
    """The result of ``read``, tried again if files that it reads are merged meanwhile."""
    for left in reversed(range(TRIES)):
        try:
            with index.cursor() as cursor:
                return read(cursor)
        except duckdb.IOException:
            if not left:
                raise
            index.refresh(PATIENCE_S)
    raise AssertionError("unreachable")


def require_column(name: str, kinds: Mapping[str, str]) -> str:
    """The type of a column.

    Raises:
        UserError: there is none of this name.
    """
    if name not in kinds:
        raise UserError(f"{name} is no column of these rollouts: choose one of {', '.join(kinds)}")
    return kinds[name]


def _relation(query: Query, kinds: Mapping[str, str]) -> tuple[str, list[str]]:
    chosen, values = _chosen(query.filters, kinds)
    if query.by == "sample":
        return f"{chosen} SELECT * FROM chosen", values
    if query.by not in {"group", "prompt"}:
        raise UserError(f"by={query.by} is no kind of row: give sample, group or prompt")
    extra = "".join(
        f"avg({quoted(name)}) AS {quoted(name)}, "
        for name in kinds
        if name.startswith("score/") or name in {"kl_mean", "response_tokens"}
    )
    groups = GROUP.format(extra=extra)
    return f"{chosen} {groups if query.by == 'group' else PROMPT.format(groups=groups)}", values


def _page_of(query: Query, relation: str, part: str) -> str:
    """The statement for a page. A page of samples sorts only the numbers of rows, to avoid sorting whole rows."""
    if query.by != "sample":
        return f"{relation} {part}"
    chosen = relation.replace("SELECT *", "SELECT rowid AS number, *", 1).removesuffix("SELECT * FROM chosen")
    order = part.partition(" LIMIT")[0]
    return f"{chosen} SELECT * EXCLUDE number FROM chosen WHERE number IN (SELECT number FROM chosen {part}) {order}"


def _chosen(filters: Sequence[Filter], kinds: Mapping[str, str]) -> tuple[str, list[str]]:
    """A common table ``chosen`` of the samples that pass all filters."""
    conditions = [each.condition(kinds) for each in filters]
    where = " AND ".join(condition for condition, _ in conditions) or "true"
    return f"WITH chosen AS (SELECT * FROM samples WHERE {where})", [
        value for _, values in conditions for value in values
    ]


def _order(query: Query, columns: Mapping[str, str]) -> str:
    direction = "DESC" if query.descending else "ASC"
    name = quoted(query.sort)
    # A user who sorts by KL looks for NaN, but not for missing values.
    rest = [f"{each} {'DESC' if each == 'step' else 'ASC'}" for each in ("step", "row", "prompt_id") if each in columns]
    return ", ".join([f"{name} {direction} NULLS LAST", *rest])


def _totals(cursor: duckdb.DuckDBPyConnection, query: Query, kinds: Mapping[str, str]) -> Row:
    chosen, values = _chosen(query.filters, kinds)
    return _rows(
        cursor,
        f"""{chosen} SELECT count(*) AS samples, count(DISTINCT step) AS steps, min(step) AS first_step, max(step) AS last_step,
        avg(reward) AS reward_mean, avg(response_tokens) AS response_tokens,
        count(*) FILTER (WHERE failed) AS failed, count(*) FILTER (WHERE finish_reason = 'length') AS truncated FROM chosen""",
        values,
    )[0]


def _samples_with_texts(index: RolloutIndex, where: str, values: list[Any]) -> list[Row]:
    with index.cursor() as cursor:
        rows = _rows(cursor, f"SELECT * FROM samples WHERE {where}", values)
    _add_texts(index, rows, index.columns(), LONGEST_TEXT)
    for row in rows:
        row.pop("file")
    return rows


def _add_texts(index: RolloutIndex, rows: list[Row], kinds: Mapping[str, str], length: int = EXCERPT) -> None:
    """Add prompt, response and label to samples, and only the prompt to groups and prompts."""
    if not rows:
        return
    whole = "row" in rows[0]
    if not whole:
        _place(index, rows)
    places = [(row["step"] if "step" in row else row["last_step"], row["row"]) for row in rows]
    numbers = {row["file"] for row in rows}

    def read(cursor: duckdb.DuckDBPyConnection) -> list[tuple[Any, ...]]:
        paths = index.paths(numbers)
        if len(paths) < len(numbers):  # replaced since the rows were chosen: find them by step
            paths = [file.path for file in list_files(index.folder)]
        return texts_of(cursor, paths, places, length)

    texts = {(step, row): rest for step, row, *rest in read_files(index, read)}
    for row, place in zip(rows, places, strict=True):
        prompt, response, label, response_length = texts.get(place, (None,) * 4)
        row["prompt"] = prompt
        if whole:
            row |= {"response": response, "label": label, "response_length": response_length}
        else:
            row.pop("row")


def texts_of(
    cursor: duckdb.DuckDBPyConnection, paths: Sequence[str], places: Sequence[tuple[int, int]], length: int
) -> list[tuple[Any, ...]]:
    """(step, row, prompt, response, label, characters of the response) of samples; texts are cut to ``length``."""
    steps, rows = [step for step, _ in places], [row for _, row in places]
    # The list of steps skips row groups; the pairs choose within them.
    listed = ", ".join("?" for _ in set(steps))
    return cursor.execute(
        f"""SELECT step, row, left(prompt, {length}), left(response, {length}), left(label, {length}), length(response)
        FROM {READ}
        WHERE step IN ({listed}) AND (step, row) IN (SELECT unnest(?), unnest(?))""",
        [escaped(paths), *sorted(set(steps)), steps, rows],
    ).fetchall()


def _place(index: RolloutIndex, rows: list[Row]) -> None:
    """Give groups and prompts the place of one of their samples, to read the prompt from."""
    step = "step" if "step" in rows[0] else "last_step"
    with index.cursor() as cursor:
        found = cursor.execute(
            """SELECT step, prompt_id, min(row), any_value(file) FROM samples
            WHERE (step, prompt_id) IN (SELECT unnest(?), unnest(?)) GROUP BY step, prompt_id""",
            [[row[step] for row in rows], [row["prompt_id"] for row in rows]],
        ).fetchall()
    places = {(at, prompt_id): (row, file) for at, prompt_id, row, file in found}
    for row in rows:
        row["row"], row["file"] = places.get((row[step], row["prompt_id"]), (0, -1))


def _columns(cursor: duckdb.DuckDBPyConnection, relation: str, values: list[str]) -> dict[str, str]:
    described = cursor.execute(f"DESCRIBE {relation}", values).fetchall()
    return {row[0]: row[1] for row in described}


def _rows(cursor: duckdb.DuckDBPyConnection, sql: str, values: Sequence[Any]) -> list[Row]:
    """The rows of a query; raises UserError if a filter's value does not fit its column."""
    try:
        cursor.execute(sql, values)
    except duckdb.ConversionException as error:
        raise UserError("a filter's value does not fit its column: give numbers for numbers, true or false") from error
    names = [column[0] for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
