"""The comparison in a real browser: what it shows, finds, orders and escapes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from urllib.parse import urlencode

import pytest

from nemo_style_rlhf.evaluation.samples import Sample, to_jsonl
from tests.support.browser import Browser
from tests.support.paths import ROOT
from tests.support.rollout_files import sample_row, table_of, write_step
from tests.support.watching import watching

HOSTILE = "</script><script>window.hit = 1</script><b>bold</b> <!-- <img src=x onerror='window.hit = 1'> &amp; \\u003c"
Cell = tuple[str, float | None]
NUMBERS = count()
ORDER = "[...document.querySelectorAll('.row')].map((row) => row.dataset.prompt).join()"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "outputs"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory, outputs: Path) -> Iterator[Browser]:
    with watching(outputs) as link, Browser(tmp_path_factory.mktemp("browser")) as running:
        running.open(link)
        yield running


def write_evaluation(
    outputs: Path, rows: list[dict[str, list[Cell]]], names: list[str], prompts: list[str] | None = None
) -> str:
    """An evaluation from the cells of each prompt by checkpoint. Its id."""
    texts = prompts or [f"prompt number {prompt_id}" for prompt_id in range(len(rows))]
    samples = [
        Sample(prompt_id, name, index, 1, texts[prompt_id], response, 5, "length" if index else "stop", score=score)
        for prompt_id, row in enumerate(rows)
        for name in names
        for index, (response, score) in enumerate(row[name])
    ]
    folder = outputs / f"evaluation{next(NUMBERS)}"
    folder.mkdir()
    (folder / "results.jsonl").write_text(to_jsonl(samples))
    checkpoints = [{"name": name, "path": f"models/{name}"} for name in names]
    told = {"prompts": "prompts.jsonl", "seed": 1, "samples_per_prompt": 1, "rewards": [], "checkpoints": checkpoints}
    (folder / "summary.json").write_text(json.dumps(told))
    return f"outputs/{folder.name}"


def opened(browser: Browser, *runs: str, ready: str = ".row", **params: object) -> Browser:
    browser.problems.clear()
    browser.run("document.querySelector('.view')?.remove()")
    browser.run(f"location.hash = {json.dumps('#/compare?' + urlencode({'run': runs, **params}, doseq=True))}")
    browser.wait(f"document.querySelector({json.dumps(ready)}) !== null")
    return browser


def prompts_shown(browser: Browser) -> list[int]:
    return browser.run("[...document.querySelectorAll('.row')].map((row) => Number(row.dataset.prompt))")


def texts(browser: Browser, selector: str) -> list[str]:
    return browser.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((found) => found.innerText)")


def counts(browser: Browser, words: str) -> None:
    """Until the page has counted so."""
    browser.wait(f"document.getElementById('count').textContent === {json.dumps(words)}")


@pytest.fixture
def three(browser: Browser, outputs: Path) -> Browser:
    """Three prompts, two checkpoints: b is better on 1 by 2, worse on 0 by 1, and equal on 2."""
    rows = [
        {"a": [("The cat sat", 1.0)], "b": [("a dog", 0.0)]},
        {"a": [("cat and CAT", 0.5)], "b": [("a bird", 2.5)]},
        {"a": [("same", 1.5)], "b": [("same", 1.5)]},
    ]
    return opened(browser, write_evaluation(outputs, rows, ["a", "b"]))


def test_prompts_responses_scores_and_the_best_of_a_row(three: Browser) -> None:
    assert prompts_shown(three) == [0, 1, 2]
    assert texts(three, ".row[data-prompt='0'] .text") == ["prompt number 0", "The cat sat", "a dog"]
    assert texts(three, ".row .score") == ["1.000", "0.000", "0.500", "2.500", "1.500", "1.500"]
    assert texts(three, ".answer.best .text") == ["The cat sat", "a bird"]  # nothing is best where all are equal
    assert texts(three, ".cell .note") == ["\u22121.000 against a", "+2.000 against a", "+0.000 against a"]
    assert texts(three, "tbody tr")[1].split("\t")[1:] == ["1.333 ± 0.726", "50.0%", "5.0", "0.0%", "3", "3"]
    assert "prompts.jsonl" in texts(three, ".facts")[0]
    assert three.problems == []


def test_the_search_filters_counts_and_marks(three: Browser) -> None:
    three.press("/")
    three.type("cat")
    counts(three, "2 of 3 prompts, 3 matches")
    assert prompts_shown(three) == [0, 1]
    assert texts(three, "mark") == ["cat", "cat", "CAT"]
    three.type(" and")
    counts(three, "1 of 3 prompts, 1 match")
    assert prompts_shown(three) == [1]
    three.press("Escape")
    counts(three, "3 prompts")
    assert (prompts_shown(three), texts(three, "mark")) == ([0, 1, 2], [])
    three.type(".*")  # a pattern to others, here just two characters
    counts(three, "0 of 3 prompts, 0 matches")
    assert three.problems == []


def test_rows_are_ordered_by_the_difference_of_their_scores(three: Browser) -> None:
    three.press("/")
    three.press("Tab")
    assert three.run("document.activeElement.id") == "order"
    assert texts(three, "#order option") == ["As in the file", "b above a most", "b below a most"]
    for choice, expected in (("above:1", "1,2,0"), ("below:1", "0,2,1"), ("file", "0,1,2")):
        three.run(f"order.value = '{choice}', order.dispatchEvent(new Event('change'))")
        three.wait(f"{ORDER} === '{expected}'")
    assert three.problems == []


def test_the_address_holds_what_the_reader_has_chosen(three: Browser) -> None:
    three.run("order.value = 'above:1', order.dispatchEvent(new Event('change'))")
    three.wait("location.hash.includes('above')")
    three.run("window.dispatchEvent(new HashChangeEvent('hashchange'))")
    three.wait(f"{ORDER} === '1,2,0'")
    assert three.run("order.value") == "above:1"


def test_texts_are_shown_as_they_are_and_never_run(browser: Browser, outputs: Path) -> None:
    rows = [{HOSTILE: [(HOSTILE, 1.0)], "b": [(HOSTILE, None)]}]
    opened(browser, write_evaluation(outputs, rows, [HOSTILE, "b"], prompts=[HOSTILE]))
    assert texts(browser, ".row .text") == [HOSTILE] * 3
    assert texts(browser, ".heads div")[1:] == [HOSTILE, "b"]
    browser.press("/")
    browser.type("<b>")
    counts(browser, "1 of 1 prompt, 3 matches")
    assert texts(browser, "mark") == ["<b>"] * 3
    assert browser.run("window.hit") is None
    assert browser.run("document.querySelectorAll('b, img').length") == 0
    assert browser.problems == []


def test_several_samples_missing_scores_and_empty_responses(browser: Browser, outputs: Path) -> None:
    rows = [{"a": [("x", 1.0), ("", None)], "b": [("  \n", 2.0), ("y" * 2000, 0.0)]}]
    opened(browser, write_evaluation(outputs, rows, ["a", "b"]))
    badges = [" ".join(text.split()) for text in texts(browser, ".cell .badges")]
    assert badges == [
        "1.000 5 tokens",
        "no score 5 tokens truncated",
        "2.000 best 5 tokens",
        "0.000 5 tokens truncated",
    ]
    assert texts(browser, ".empty") == ["empty", "only white space"]
    folded = "document.querySelector('.text.folded') !== null"
    assert browser.run(folded)
    browser.run("document.querySelector('.fold').click()")
    assert not browser.run(folded)


def test_without_scores_there_is_nothing_to_order_by(browser: Browser, outputs: Path) -> None:
    opened(browser, write_evaluation(outputs, [{"a": [("x", None)], "b": [("y", None)]}], ["a", "b"]))
    assert texts(browser, ".score, .cut, .best") == []
    assert browser.run("getComputedStyle(document.getElementById('order').parentElement).display") == "none"
    assert "no scores" in texts(browser, ".facts")[0]


def test_a_narrow_window_has_one_column_and_names_each_response(three: Browser) -> None:
    three.resize(400, 700)
    try:
        lefts = three.run("[...document.querySelectorAll('.row[data-prompt=\"0\"] section')].map((s) => s.offsetLeft)")
        assert len(set(lefts)) == 1
        assert texts(three, ".row[data-prompt='0'] .column-name") == ["a", "b"]
        assert three.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    finally:
        three.resize(1280, 900)


def test_two_thousand_rows_are_searched_and_shown_as_one_scrolls(browser: Browser, outputs: Path) -> None:
    words = ["some", "of", "these", "words", "occur", "in", "every", "row", "others", "in", "hardly", "any"]
    rows = [
        {
            name: [(" ".join(words[(row + k * 7) % len(words)] for k in range(60)) + f" n{row}", row % 7 + 0.1)]
            for name in "ab"
        }
        for row in range(2000)
    ]
    run = write_evaluation(outputs, rows, ["a", "b"])
    opened(browser, run)
    counts(browser, "2,000 prompts")
    assert len(prompts_shown(browser)) < 200  # the rest come while one scrolls
    browser.press("/")
    browser.type("n1234")
    counts(browser, "1 of 2,000 prompts, 2 matches")
    assert prompts_shown(browser) == [1234]
    browser.press("Escape")
    counts(browser, "2,000 prompts")
    browser.run("document.getElementById('more').click()")
    browser.wait("document.querySelectorAll('.row').length > 20")
    shown = prompts_shown(browser)
    assert shown == list(range(len(shown)))
    assert browser.problems == []


def test_two_runs_are_chosen_and_lead_to_their_samples(browser: Browser, outputs: Path) -> None:
    for run, good in (("first", 0.0), ("second", 1.0)):
        rows = [sample_row(4, row, f"question {row // 2}?", f"{run} says {row}", reward=row + good) for row in range(4)]
        write_step(outputs / run / "rollouts", 4, table_of(rows))
        (outputs / run / "metrics.jsonl").write_text("")
    opened(browser, ready=".comparisons form")
    browser.run("document.querySelector('.comparisons form').requestSubmit()")
    browser.wait("document.querySelectorAll('.row').length === 2")
    assert texts(browser, ".heads div")[1:] == ["outputs/first, step 4", "outputs/second, step 4"]
    assert texts(browser, ".cell .note")[0] == "+1.000 against outputs/first, step 4"
    assert texts(browser, "tbody tr")[1].split("\t")[2] == "100.0%"
    browser.run("[...document.querySelectorAll('.cell a')].at(-1).click()")
    browser.wait("document.querySelector('h1')?.innerText === 'Step 4, sample 3'")
    opened(browser, "outputs/first", "outputs/second", ready=".facts", step=[4, 5])
    assert texts(browser, ".facts")[0].startswith("These have no prompt in common")
    assert browser.problems == []


def test_a_report_searches_and_sorts_without_a_server(browser: Browser, outputs: Path, tmp_path: Path) -> None:
    """More rows than an answer holds, of which one differs."""
    rows = [{"a": [("same", 1.0)], "b": [("same", 1.0)]} for _ in range(130)]
    rows[120] = {"a": [("The cat", 1.0)], "b": [(HOSTILE, 3.0)]}
    run = write_evaluation(outputs, rows, ["a", "b"])
    report = tmp_path / "report.html"
    subprocess.run(
        [sys.executable, ROOT / "trainers" / "watch.py", outputs / run.rpartition("/")[2], f"--export={report}"],
        check=True,
    )
    name = run.rpartition("/")[2]
    with Browser(tmp_path) as reader:
        reader.open(report)
        opened(reader, name)
        counts(reader, "130 prompts")
        reader.run("order.value = 'above:1', order.dispatchEvent(new Event('change'))")
        reader.wait(f"{ORDER}.startsWith('120,0,1,')")
        assert texts(reader, ".cell .note")[0] == "+2.000 against a"
        reader.press("/")
        reader.type("CAT")
        counts(reader, "1 of 130 prompts, 1 match")
        assert texts(reader, "mark") == ["cat"]
        assert reader.run("window.hit") is None
        assert reader.problems == []


def test_nothing_to_compare_is_said(browser: Browser, outputs: Path) -> None:
    opened(browser, "outputs/none", ready=".comparisons")
    assert "Compare" in texts(browser, "h1")
