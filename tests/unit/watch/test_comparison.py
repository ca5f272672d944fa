"""Responses side by side: pairs, orders, searches and summaries of evaluations and of rollouts."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.evaluation.samples import Sample, from_jsonl, to_jsonl
from nemo_style_rlhf.watch.rollout_sources import RolloutSources
from nemo_style_rlhf.watch.runs import Runs, UnknownRun
from nemo_style_rlhf.watch.sample_queries import Query
from tests.support.rollout_files import sample_row, table_of, write_compacted, write_step


def answer(prompt_id: int, checkpoint: str, response: str, score: float | None, index: int = 0) -> Sample:
    finish = "length" if index else "stop"
    return Sample(prompt_id, checkpoint, index, 1, f"prompt {prompt_id}", response, 5, finish, score=score)


SAMPLES = [
    answer(0, "a", "The cat sat", 1.0), answer(0, "b", "a dog", 0.0), answer(1, "a", "cat and CAT", 0.5),
    answer(1, "b", "a bird", 2.5), answer(2, "a", "same", 1.5), answer(2, "b", "same", 1.5), answer(3, "a", "x", None),
    answer(3, "b", "y", 1.0),
]  # fmt: skip
"""b is better on 1 by 2, worse on 0 by 1, equal on 2; 3 has no score of a."""


def write_evaluation(folder: Path, samples: list[Sample], **told: Any) -> None:
    folder.mkdir(parents=True)
    (folder / "results.jsonl").write_text(to_jsonl(samples))
    names = dict.fromkeys(sample.checkpoint for sample in samples)
    checkpoints = [{"name": name, "path": f"models/{name}"} for name in names]
    (folder / "summary.json").write_text(json.dumps({"prompts": "p.jsonl", "checkpoints": checkpoints, **told}))


@pytest.fixture
def sources(tmp_path: Path) -> RolloutSources:
    """An evaluation, and two runs whose steps 1 have one prompt in common."""
    write_evaluation(tmp_path / "outputs" / "evaluation", SAMPLES)
    for run, prompts in (("one", ["p", "q"]), ("two", ["q", "r"])):
        folder = tmp_path / "outputs" / run
        rows = [sample_row(1, row, prompts[row // 2], f"{run} {row}", prompt_id=row // 2) for row in range(4)]
        write_step(folder / "rollouts", 1, table_of(rows))
        (folder / "metrics.jsonl").write_text("")
    write_step(tmp_path / "outputs" / "one" / "rollouts", 2, table_of([sample_row(2, 0, "q", "later", reward=9.0)]))
    return RolloutSources(Runs([tmp_path / "outputs"]))


def compare(sources: RolloutSources, *runs: str, **given: Any) -> dict[str, Any]:
    defaults = {"steps": [], "order": "file", "text": "", "offset": 0, "limit": 20}
    return sources.compare([f"outputs/{run}" for run in runs], **{**defaults, **given})


def ids(found: dict[str, Any]) -> list[int]:
    return [row["id"] for row in found["rows"]]


def test_results_are_read_as_they_were_written() -> None:
    assert list(from_jsonl(to_jsonl(SAMPLES).splitlines())) == SAMPLES


def test_an_evaluation_has_its_summary_and_the_best_of_each_row(sources: RolloutSources) -> None:
    found = compare(sources, "evaluation")
    assert [side["name"] for side in found["sides"]] == ["a", "b"]
    assert [side["path"] for side in found["sides"]] == ["models/a", "models/b"]
    assert found["sides"][0]["mean_score"] == 1.0 and found["sides"][0]["unscored"] == 1
    assert found["sides"][1]["win_rate"] == 0.5  # lost, won, and a tie
    best = [[cell["best"] for cells in row["cells"] for cell in cells] for row in found["rows"]]
    assert best == [[True, False], [False, True], [False, False], [False, False]]
    assert [row["differences"][1] for row in found["rows"]] == [-1.0, 2.0, 0.0, None]


@pytest.mark.parametrize(
    ("order", "expected"),
    [("file", [0, 1, 2, 3]), ("above:1", [1, 2, 0, 3]), ("below:1", [0, 2, 1, 3]), ("highest", [2, 0, 1, 3])],
)
def test_rows_are_ordered_by_scores_and_those_without_come_last(
    sources: RolloutSources, order: str, expected: list[int]
) -> None:
    assert ids(compare(sources, "evaluation", order=order)) == expected
    assert ids(compare(sources, "evaluation", order=order, offset=1, limit=2)) == expected[1:3]


@pytest.mark.parametrize("order", ["above:0", "above:2", "above:x", "sideways", "highest:1"])
def test_another_order_is_refused(sources: RolloutSources, order: str) -> None:
    with pytest.raises(UserError, match="is no order"):
        compare(sources, "evaluation", order=order)


def test_a_search_counts_rows_and_matches(sources: RolloutSources) -> None:
    found = compare(sources, "evaluation", text="cat")
    assert (ids(found), found["found"], found["total"], found["matches"]) == ([0, 1], 2, 4, 3)
    assert compare(sources, "evaluation", text=".*")["found"] == 0


def test_two_runs_meet_on_the_prompts_that_they_share(sources: RolloutSources) -> None:
    found = compare(sources, "one", "two")
    assert [side["name"] for side in found["sides"]] == ["outputs/one, step 1", "outputs/two, step 1"]
    assert (found["total"], found["elsewhere"]) == (1, 2)
    (row,) = found["rows"]
    assert row["prompt"] == "q"
    assert [[cell["text"] for cell in cells] for cells in row["cells"]] == [["one 2", "one 3"], ["two 0", "two 1"]]
    assert row["cells"][1][1]["sample"] == {"run": "outputs/two", "step": 1, "row": 1}
    assert found["sides"][1]["win_rate"] == 0.0  # rewards 0 and 1 against 2 and 3, in their order


def test_a_page_is_kept_until_a_sample_comes_or_goes(sources: RolloutSources, tmp_path: Path) -> None:
    page = sources.page("outputs/two", Query())
    while page["files_read"] < page["files"]:
        page = sources.page("outputs/two", Query())
    kept = sources.page("outputs/two", Query())
    assert sources.page("outputs/two", Query()) is kept
    assert sources.page("outputs/two", Query(limit=1)) is not kept
    write_step(tmp_path / "outputs" / "two" / "rollouts", 2, table_of([sample_row(2, 0, "p", "new")]))
    assert sources.page("outputs/two", Query())["rows"][0]["response"] == "new"


def test_two_steps_of_a_run(sources: RolloutSources) -> None:
    found = compare(sources, "one", "one", steps=[1, 2])
    assert [side["mean_score"] for side in found["sides"]] == [2.5, 9.0]
    assert found["rows"][0]["differences"] == [0.0, 6.5]


def test_an_evaluation_may_meet_rollouts(sources: RolloutSources) -> None:
    found = compare(sources, "evaluation", "one")
    assert (found["total"], found["sides"]) == (0, [])


def test_what_cannot_be_compared_is_said(sources: RolloutSources, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to compare"):
        compare(sources)
    with pytest.raises(UnknownRun, match="there is no run outputs/none"):
        compare(sources, "none")
    (tmp_path / "outputs" / "evaluation" / "results.jsonl").write_text('{"prompt": 1}\n')
    with pytest.raises(UserError, match=r"is no result of trainers/evaluate\.py"):
        compare(sources, "evaluation")
    (tmp_path / "outputs" / "empty").mkdir()
    (tmp_path / "outputs" / "empty" / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="no step in common"):
        compare(sources, "one", "empty")


def test_the_newest_common_step_is_one_that_both_have_recorded(sources: RolloutSources, tmp_path: Path) -> None:
    """The name of a merged file says nothing about the steps in between."""
    write_compacted(
        tmp_path / "outputs" / "one" / "rollouts", 3, 9, [table_of([sample_row(step, 0, "q", "x")]) for step in (3, 9)]
    )
    write_step(tmp_path / "outputs" / "two" / "rollouts", 5, table_of([sample_row(5, 0, "q", "y")]))
    found = compare(sources, "one", "two")
    assert [side["name"] for side in found["sides"]] == ["outputs/one, step 1", "outputs/two, step 1"]


@pytest.mark.parametrize("content", ["", "[]\n"])
def test_results_without_a_sample_are_a_sentence(sources: RolloutSources, tmp_path: Path, content: str) -> None:
    (tmp_path / "outputs" / "evaluation" / "results.jsonl").write_text(content)
    with pytest.raises(UserError, match=r"is no result of trainers/evaluate\.py"):
        compare(sources, "evaluation")
