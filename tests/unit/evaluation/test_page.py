"""The page in a real browser: what it shows, finds, orders and escapes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_style_rlhf.evaluation.page import embedded_json, render_page
from nemo_style_rlhf.evaluation.samples import Sample
from nemo_style_rlhf.evaluation.summary import summarize
from nemo_style_rlhf.schema.evaluation import EvaluationConfig
from tests.support.browser import Browser

HOSTILE = "</script><script>window.hit = 1</script><b>bold</b> <!-- <img src=x onerror='window.hit = 1'> &amp; \\u003c"
Cell = tuple[str, float | None]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


def page(rows: list[dict[str, list[Cell]]], names: list[str], *, prompts: list[str] | None = None) -> str:
    """Of the cells of each prompt by checkpoint."""
    config = EvaluationConfig(checkpoints=[f"{name}:models/{name}" for name in names])
    config.data.path = "prompts.jsonl"
    texts = prompts or [f"prompt number {prompt_id}" for prompt_id in range(len(rows))]
    samples = {
        name: [
            Sample(prompt_id, name, index, 1, texts[prompt_id], response, 5, "length" if index else "stop", score=score)
            for prompt_id, row in enumerate(rows)
            for index, (response, score) in enumerate(row[name])
        ]
        for name in names
    }
    first = samples[names[0]]
    summaries = [
        summarize(name, f"models/{name}", samples[name], None if name == names[0] else first) for name in names
    ]
    return render_page(config, summaries, samples)


def opened(browser: Browser, folder: Path, html: str) -> Browser:
    (folder / "index.html").write_text(html)
    browser.problems.clear()
    browser.open(folder / "index.html")
    return browser


def prompts_shown(browser: Browser) -> list[int]:
    return browser.run("[...document.querySelectorAll('.row')].map((row) => Number(row.dataset.prompt))")


def texts(browser: Browser, selector: str) -> list[str]:
    return browser.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((found) => found.innerText)")


def count(browser: Browser) -> str:
    return browser.run("document.getElementById('count').textContent")


@pytest.fixture
def three(browser: Browser, tmp_path: Path) -> Browser:
    """Three prompts, two checkpoints: b is better on 1 by 2, worse on 0 by 1, and equal on 2."""
    rows = [
        {"a": [("The cat sat", 1.0)], "b": [("a dog", 0.0)]},
        {"a": [("cat and CAT", 0.5)], "b": [("a bird", 2.5)]},
        {"a": [("same", 1.5)], "b": [("same", 1.5)]},
    ]
    return opened(browser, tmp_path, page(rows, ["a", "b"]))


def test_prompts_responses_scores_and_the_best_of_a_row(three: Browser):
    assert prompts_shown(three) == [0, 1, 2]
    assert texts(three, ".row[data-prompt='0'] .text") == ["prompt number 0", "The cat sat", "a dog"]
    assert texts(three, ".row .score") == ["1.000", "0.000", "0.500", "2.500", "1.500", "1.500"]
    assert texts(three, ".response.best .text") == ["The cat sat", "a bird"]  # nothing is best where all are equal
    assert texts(three, ".cell .note") == ["\u22121.000 against a", "+2.000 against a", "+0.000 against a"]
    assert texts(three, "tbody tr")[1].split("\t")[1:] == ["1.333 ± 0.726", "50.0%", "5.0", "0.0%", "3", "3"]
    assert three.problems == []


def test_the_search_filters_counts_and_marks(three: Browser):
    three.press("/")
    three.type("cat")
    assert prompts_shown(three) == [0, 1]
    assert count(three) == "2 of 3 prompts, 3 matches"
    assert texts(three, "mark") == ["cat", "cat", "CAT"]
    three.type(" and")
    assert prompts_shown(three) == [1]
    three.press("Escape")
    assert prompts_shown(three) == [0, 1, 2]
    assert (count(three), texts(three, "mark")) == ("3 prompts", [])
    three.type(".*")  # a pattern to others, here just two characters
    assert count(three) == "0 of 3 prompts, 0 matches"


def test_rows_are_ordered_by_the_difference_of_their_scores(three: Browser):
    three.press("/")
    three.press("Tab")
    assert three.run("document.activeElement.id") == "order"
    assert texts(three, "option") == ["As in the file", "b above a most", "b below a most"]
    for choice, expected in (("1", [1, 2, 0]), ("2", [0, 2, 1]), ("0", [0, 1, 2])):
        three.run(f"order.value = {choice}; order.dispatchEvent(new Event('change'))")
        assert prompts_shown(three) == expected


def test_texts_are_shown_as_they_are_and_never_run(browser: Browser, tmp_path: Path):
    rows = [{HOSTILE: [(HOSTILE, 1.0)], "b": [(HOSTILE, None)]}]
    html = page(rows, [HOSTILE, "b"], prompts=[HOSTILE])
    opened(browser, tmp_path, html)
    assert texts(browser, ".row .text") == [HOSTILE] * 3
    assert texts(browser, ".heads div")[1:] == [HOSTILE, "b"]
    assert browser.run("window.hit") is None
    assert browser.run("document.querySelectorAll('b, img').length") == 0
    browser.press("/")
    browser.type("<b>")
    assert texts(browser, "mark") == ["<b>"] * 3
    assert browser.problems == []


def test_several_samples_missing_scores_and_empty_responses(browser: Browser, tmp_path: Path):
    rows = [{"a": [("x", 1.0), ("", None)], "b": [("  \n", 2.0), ("y" * 2000, 0.0)]}]
    opened(browser, tmp_path, page(rows, ["a", "b"]))
    badges = [" ".join(text.split()) for text in texts(browser, ".badges")]
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


def test_without_scores_there_is_nothing_to_order_by(browser: Browser, tmp_path: Path):
    opened(browser, tmp_path, page([{"a": [("x", None)], "b": [("y", None)]}], ["a", "b"]))
    assert texts(browser, ".score, .cut, .best") == []
    assert browser.run("getComputedStyle(document.getElementById('order').parentElement).display") == "none"
    assert "no scores" in texts(browser, ".facts")[0]


def test_a_narrow_window_has_one_column_and_names_each_response(three: Browser):
    three.resize(380, 700)
    try:
        lefts = three.run("[...document.querySelectorAll('.row[data-prompt=\"0\"] section')].map((s) => s.offsetLeft)")
        assert len(set(lefts)) == 1
        assert texts(three, ".row[data-prompt='0'] .name") == ["a", "b"]
        assert three.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    finally:
        three.resize(1280, 900)


def test_dark_is_dark(three: Browser):
    brightness = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).every((c) => c < 60)"
    assert not three.run(brightness)
    three.dark(True)
    try:
        assert three.run(brightness)
    finally:
        three.dark(False)


def test_two_thousand_rows_are_searched_within_a_blink(browser: Browser, tmp_path: Path):
    """A blink takes 0.1 to 0.4 s; the median of several searches, since the machine may be doing something else."""
    words = ["some", "of", "these", "words", "occur", "in", "every", "row", "others", "in", "hardly", "any"]
    rows = [
        {
            name: [(" ".join(words[(row + k * 7) % len(words)] for k in range(60)) + f" n{row}", row % 7 + 0.1)]
            for name in "ab"
        }
        for row in range(2000)
    ]
    opened(browser, tmp_path, page(rows, ["a", "b"]))
    assert count(browser) == "2,000 prompts"
    assert len(prompts_shown(browser)) < 200  # the rest come while one scrolls
    seconds = browser.run(
        "['e', 'words occur', 'n1234', 'row', 'hardly', 'zzz', ''].map((query) => {"
        " const start = performance.now(); search.value = query; search.dispatchEvent(new Event('input'));"
        " document.body.offsetHeight; return (performance.now() - start) / 1000; }).sort((a, b) => a - b)"
    )
    assert seconds[len(seconds) // 2] < 0.4, seconds
    browser.press("/")
    browser.type("n1234")
    assert (prompts_shown(browser), count(browser)) == ([1234], "1 of 2,000 prompts, 2 matches")
    browser.press("Escape")
    browser.run("new Promise((done) => { document.getElementById('more').click(); requestAnimationFrame(done); })")
    shown = prompts_shown(browser)
    assert shown == list(range(len(shown))) and len(shown) > 20


def test_the_file_is_whole_in_itself_and_its_data_can_end_no_element():
    html = page([{"a": [(HOSTILE, 1.0)]}], ["a"], prompts=[HOSTILE])
    assert len(re.findall(r"</script", html)) == 2
    assert not re.search(r"(?:src|href)=[\"']?https?:|@import|url\(", html)
    assert json.loads(embedded_json({"text": HOSTILE + "\u2028"})) == {"text": HOSTILE + "\u2028"}
    assert not set("<>&") & set(embedded_json([HOSTILE]))
