"""A search over all texts: what it finds, in what order, and that it stops."""

from pathlib import Path
from typing import Any

import pytest

from nemo_style_rlhf.watch.search import MOST_HITS, Search
from tests.support.rollout_files import sample_row, table_of, write_compacted, write_step


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    texts = {
        1: ("What?", "the Straße"),
        2: ("the cat", "a dog"),
        3: ("x", "100% _sure_ 'quoted' \u202e\x00 CAT"),
        4: ("y", ""),
    }
    tables = {step: table_of([sample_row(step, 0, *pair)]) for step, pair in texts.items()}
    write_compacted(tmp_path, 1, 3, [tables[step] for step in (1, 2, 3)])
    write_step(tmp_path, 4, tables[4])
    return tmp_path


def hits(folder: Path, text: str, **given: int) -> list[dict[str, Any]]:
    return [message for message in Search(folder, text, **given).messages() if "row" in message]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("cat", [(3, "response", "CAT"), (2, "prompt", "cat")]),
        ("THE", [(2, "prompt", "the"), (1, "response", "the")]),
        ("100% _", [(3, "response", "100% _")]),
        ("' \u202e\x00", [(3, "response", "' \u202e\x00")]),
        ("%", [(3, "response", "%")]),
        (".*", []),
        ("'; DROP TABLE x; --", []),
    ],
)
def test_a_search_is_for_the_words_as_they_are_in_either_case(
    folder: Path, text: str, found: list[tuple[int, str, str]]
) -> None:
    assert [(hit["step"], hit["where"], hit["match"]) for hit in hits(folder, text)] == found


@pytest.mark.slow("searches a megabyte in many ways")
def test_a_hit_shows_what_stands_around_it_and_little_of_a_megabyte(tmp_path: Path) -> None:
    write_step(tmp_path, 1, table_of([sample_row(1, 0, "p", "a" * 2**20 + "needle" + "b" * 2**20) | {"tokens": []}]))
    (hit,) = hits(tmp_path, "NEEDLE")
    assert (hit["before"], hit["match"], hit["after"]) == ("a" * 80, "needle", "b" * 80)
    assert hit["cut_before"] and hit["cut_after"]


def test_it_says_how_far_it_is_and_ends_at_the_most_hits(folder: Path) -> None:
    messages = list(Search(folder, "nothing has this").messages())
    assert messages[0] == {"searched": 0, "of": 4}
    assert messages[-1] == {"done": True, "hits": 0, "cut": False, "searched": 4, "of": 4}
    cut = list(Search(folder, "a", most=1).messages())[-1]
    assert (cut["cut"], cut["hits"]) == (True, 1)
    assert len(hits(folder, "a")) == 3 < MOST_HITS


def test_it_goes_on_where_files_are_compacted_and_thinned_out_meanwhile(folder: Path) -> None:
    messages = Search(folder, "cat").messages()
    assert next(messages) == {"searched": 0, "of": 4}
    (folder / "step_000004.parquet").unlink()
    (folder / "steps_000001_000003.parquet").rename(folder / "steps_000001_000004.parquet")
    assert [message["step"] for message in messages if "row" in message] == [3, 2]


def test_it_passes_over_a_link_to_a_file_elsewhere(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "step_000005.parquet"
    (folder / "step_000004.parquet").rename(elsewhere)
    (folder / "step_000005.parquet").symlink_to(elsewhere)
    assert [hit["step"] for hit in hits(folder, "cat")] == [3, 2]


def test_it_stops_when_it_is_told_to(folder: Path) -> None:
    search = Search(folder, "cat")
    messages = search.messages()
    assert next(messages) == {"searched": 0, "of": 4}
    search.stop()
    assert list(messages) == []
    search.stop()  # once more, when all is closed
