"""Pages of samples against plain Python over the same rows, and files that come and go meanwhile."""

import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.watch.rollout_files import list_files, open_database
from nemo_style_rlhf.watch.rollout_index import RolloutIndex
from nemo_style_rlhf.watch.sample_queries import Filter, Query, group, history, page, sample
from nemo_style_rlhf.watch.search import Search
from tests.support.rollout_files import sample_row, table_of, write_compacted, write_step

Rows = list[dict[str, Any]]


def step_rows(step: int, **given: Any) -> Rows:
    """Six samples of three prompts; sample 4 failed, sample 5 is truncated, sample 1 has NaN for its KL."""
    rng = random.Random(step)
    rows = [
        sample_row(step, row, f"prompt {row // 2}", f"answer {step}.{row}", prompt_id=row // 2, index=row % 2, **given)
        for row in range(6)
    ]
    for row in rows:
        row |= {"reward": rng.choice([0.5, 1.0, 2.0]), "kl_max": rng.random(), "score/length": float(row["row"])}
    rows[1]["kl_max"] = math.nan
    rows[4] |= {"failed": True, "reward": None}
    rows[5]["finish_reason"] = "length"
    return rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Steps 1 to 3 compacted, 4 and 5 alone; only the last has score/late."""
    write_compacted(tmp_path, 1, 3, [table_of(step_rows(step)) for step in (1, 2, 3)])
    write_step(tmp_path, 4, table_of(step_rows(4)))
    write_step(tmp_path, 5, table_of([row | {"score/late": 1.0} for row in step_rows(5)]))
    return tmp_path


def read(index: RolloutIndex, query: Query = Query()) -> dict[str, Any]:  # noqa: B008 - frozen
    found = page(index, query)
    while found["files_read"] < found["files"]:
        found = page(index, query)
    return found


def places(found: dict[str, Any]) -> list[tuple[int, int]]:
    return [(row["step"], row["row"]) for row in found["rows"]]


def test_the_newest_step_comes_first_with_its_texts(folder: Path) -> None:
    found = read(RolloutIndex(folder), Query(limit=7))
    assert places(found) == [*((5, row) for row in range(6)), (4, 0)]
    assert found["rows"][2]["response"] == "answer 5.2" and found["rows"][2]["prompt"] == "prompt 1"
    assert [row["score/late"] for row in found["rows"]] == [1.0] * 6 + [None]
    assert found["total"] == 30
    assert (found["totals"]["failed"], found["totals"]["truncated"], found["totals"]["steps"]) == (5, 5, 5)


@pytest.mark.parametrize(
    ("filters", "keeps"),
    [
        (["failed:eq:true"], lambda row: row["failed"]),
        (["finish_reason:eq:length"], lambda row: row["finish_reason"] == "length"),
        (["reward:ge:1"], lambda row: row["reward"] is not None and row["reward"] >= 1),
        (["reward:is:null"], lambda row: row["reward"] is None),
        (["step:gt:2", "score/length:lt:3"], lambda row: row["step"] > 2 and row["score/length"] < 3),
        (["prompt_id:ne:1"], lambda row: row["prompt_id"] != 1),
    ],
)
def test_filters_keep_what_plain_python_keeps(
    folder: Path, filters: list[str], keeps: Callable[[dict[str, Any]], bool]
) -> None:
    found = read(RolloutIndex(folder), Query(tuple(Filter.parse(each) for each in filters), limit=100))
    expected = [(row["step"], row["row"]) for step in (5, 4, 3, 2, 1) for row in step_rows(step) if keeps(row)]
    assert places(found) == expected and found["total"] == len(expected) > 0


@pytest.mark.parametrize("descending", [True, False])
def test_the_order_is_that_of_the_column_and_missing_values_come_last(folder: Path, descending: bool) -> None:
    found = read(RolloutIndex(folder), Query(sort="reward", descending=descending, limit=100))
    rewards = [row["reward"] for row in found["rows"]]
    there = [reward for reward in rewards if reward is not None]
    assert rewards == [*sorted(there, reverse=descending), *[None] * 5]
    first, second = (read(RolloutIndex(folder), Query(sort="reward", offset=at, limit=4)) for at in (0, 4))
    whole = read(RolloutIndex(folder), Query(sort="reward", limit=8))
    assert places(first) + places(second) == places(whole)


def test_the_worst_kl_is_one_that_is_no_number(folder: Path) -> None:
    found = read(RolloutIndex(folder), Query(sort="kl_max", limit=6))
    assert places(found)[:5] == [(step, 1) for step in (5, 4, 3, 2, 1)]
    assert math.isnan(found["rows"][0]["kl_max"]) and found["rows"][5]["kl_max"] < 1


def test_groups_and_prompts_over_the_steps(folder: Path) -> None:
    index = RolloutIndex(folder)
    groups = read(index, Query(by="group", sort="reward_spread", limit=100))
    assert groups["total"] == 15
    for row in groups["rows"]:
        rewards = [each["reward"] for each in step_rows(row["step"]) if each["prompt_id"] == row["prompt_id"]]
        there = [reward for reward in rewards if reward is not None]
        assert row["reward_mean"] == pytest.approx(sum(there) / len(there))
        assert row["prompt"] == f"prompt {row['prompt_id']}"
    prompts = read(index, Query(by="prompt", sort="prompt_id", descending=False))
    assert [(row["prompt_id"], row["steps"], row["samples"]) for row in prompts["rows"]] == [
        (0, 5, 10),
        (1, 5, 10),
        (2, 5, 10),
    ]
    means = [sum(row["reward"] for row in step_rows(step)[:2]) / 2 for step in (1, 5)]
    assert prompts["rows"][0]["reward_change"] == pytest.approx(means[1] - means[0])


def test_a_prompt_over_the_steps_and_a_group_have_all_their_texts(folder: Path) -> None:
    index = RolloutIndex(folder)
    found = history(index, 1, 1, 2)
    assert [row["step"] for row in found["steps"]] == [1, 2, 3, 4, 5]
    assert [row["response"] for row in found["samples"]] == ["answer 4.2", "answer 4.3", "answer 3.2", "answer 3.3"]
    assert [row["response"] for row in group(index, 2, 1)] == ["answer 2.2", "answer 2.3"]


def test_one_sample_has_its_lists(folder: Path) -> None:
    index = RolloutIndex(folder)
    for step in (2, 5):
        found = sample(index, step, 3)
        expected = next(row for row in step_rows(step) if row["row"] == 3)
        assert found["tokens"] == expected["tokens"] and found["kl"] == pytest.approx(expected["kl"])
        assert found["turns"] == expected["turns"]
    with pytest.raises(UserError, match="sample 6 of step 5 is not recorded"):
        sample(index, 5, 6)
    with pytest.raises(UserError, match="sample 0 of step 77 is not recorded"):
        sample(index, 77, 0)


@pytest.mark.parametrize(
    "text",
    [
        'x" OR 1=1; DROP TABLE samples; --:eq:1',
        "reward:eq:1 OR 1=1",
        "reward:eq:'; DROP TABLE samples; --",
        "failed:eq:(SELECT 1)",
        "reward:like:1",
        "reward:is:1",
        "reward",
    ],
)
def test_a_filter_is_never_sql(folder: Path, text: str) -> None:
    index = RolloutIndex(folder)
    with pytest.raises(UserError, match=r"is no column|does not fit|is no filter"):
        read(index, Query((Filter.parse(text),)))
    with pytest.raises(UserError, match="is no column"):
        read(index, Query(sort="reward; DROP TABLE samples"))
    assert read(index)["total"] == 30


def test_a_columns_name_may_hold_anything(tmp_path: Path) -> None:
    name = "score/a\"b'c; --"
    write_step(tmp_path, 1, table_of([sample_row(1, 0, "p", "r") | {name: 3.0}]))
    found = read(RolloutIndex(tmp_path), Query((Filter.parse(f"{name}:eq:3"),), sort=name))
    assert found["rows"][0][name] == 3.0


def test_new_steps_compaction_and_thinning_show_at_the_next_look(folder: Path) -> None:
    index = RolloutIndex(folder)
    assert read(index)["total"] == 30
    write_step(folder, 6, table_of(step_rows(6)))
    assert places(read(index))[0] == (6, 0)
    write_compacted(folder, 4, 6, [table_of(step_rows(step)) for step in (4, 5, 6)])
    assert read(index)["total"] == 36  # the single files still lie beside the compacted one
    for step in (4, 5, 6):
        (folder / f"step_{step:06d}.parquet").unlink()
    found = read(index)
    assert found["total"] == 36 and found["rows"][0]["response"] == "answer 6.0"
    (folder / "steps_000001_000003.parquet").unlink()
    assert (read(index)["totals"]["first_step"], read(index)["total"]) == (4, 18)


def test_a_step_that_a_resumed_run_writes_again_replaces_the_old_one(folder: Path) -> None:
    index = RolloutIndex(folder)
    read(index)
    write_step(folder, 5, table_of([sample_row(5, 0, "new prompt", "new answer")]))
    found = read(index)
    assert found["total"] == 25 and found["rows"][0]["response"] == "new answer"


def test_files_that_vanish_after_the_look_are_found_where_they_went(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the index and the texts, two single files become a compacted one."""
    index = RolloutIndex(folder)
    read(index)
    plain = index.refresh

    def refresh_then_compact(patience_s: float) -> tuple[int, int]:
        found = plain(patience_s)
        if (folder / "step_000005.parquet").exists():
            write_compacted(folder, 4, 5, [table_of(step_rows(step)) for step in (4, 5)])
            for step in (4, 5):
                os.unlink(folder / f"step_{step:06d}.parquet")
        return found

    monkeypatch.setattr(index, "refresh", refresh_then_compact)
    found = page(index, Query(limit=3))
    assert [row["response"] for row in found["rows"]] == ["answer 5.0", "answer 5.1", "answer 5.2"]


def test_a_folders_name_is_no_pattern_and_adds_no_column(tmp_path: Path) -> None:
    for name in ("lr=1 [a]?", "lr=1 a-"):
        (tmp_path / name).mkdir()
        write_step(tmp_path / name, 1, table_of(step_rows(1)))
    index = RolloutIndex(tmp_path / "lr=1 [a]?")
    found = read(index)
    assert found["total"] == len(found["rows"]) == 6 and "lr" not in index.columns()
    assert [row["response"] for row in found["rows"]] == [f"answer 1.{row}" for row in range(6)]
    assert len([message for message in Search(index.folder, "answer 1.3").messages() if "row" in message]) == 1


def test_no_folder_and_an_empty_one_are_empty_runs(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        for by in ("sample", "group", "prompt"):
            found = read(RolloutIndex(folder), Query(by=by))
            assert (found["rows"], found["total"], found["totals"]["samples"]) == ([], 0, 0)
        assert list_files(folder) == []


def test_the_database_reads_only_the_rollouts(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    secret = tmp_path_factory.mktemp("elsewhere") / "secret.csv"
    secret.write_text("a,b\n1,2\n")
    database = open_database(folder, threads=1, memory="100MB")
    assert database.execute("SELECT count(*) FROM read_parquet(?)", [f"{folder}/step_000004.parquet"]).fetchall() == [
        (6,)
    ]
    for statement in (
        f"SELECT * FROM read_csv('{secret}')",
        f"COPY (SELECT 1) TO '{secret.parent}/written.csv'",
        "INSTALL httpfs",
        "SET enable_external_access = true",
    ):
        with pytest.raises(Exception, match=r"[Pp]ermission|disabled|locked"):
            database.execute(statement)
    assert list(secret.parent.iterdir()) == [secret]


def test_a_damaged_file_is_counted_and_hides_no_other(folder: Path) -> None:
    (folder / "step_000006.parquet").write_bytes(b"")
    (folder / "step_000007.parquet").write_bytes((folder / "step_000005.parquet").read_bytes()[:-40])
    index = RolloutIndex(folder)
    found = read(index)
    assert (found["damaged"], found["total"], found["files_read"], found["files"]) == (2, 30, 3, 3)
    (folder / "step_000006.parquet").unlink()
    while (found := read(index))["damaged"] == 2:
        pass
    assert (found["damaged"], found["total"]) == (1, 30)


def test_a_link_to_a_file_elsewhere_counts_as_damaged(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "step_000006.parquet"
    elsewhere.write_bytes((folder / "step_000005.parquet").read_bytes())
    (folder / "step_000006.parquet").symlink_to(elsewhere)
    found = read(RolloutIndex(folder))
    assert (found["damaged"], found["total"], found["files_read"], found["files"]) == (1, 30, 3, 3)
