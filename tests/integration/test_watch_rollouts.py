"""Views over rollouts in a real browser: tables, tokens, groups and prompts; hostile texts, empty runs, thousands of tokens."""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.support.browser import Browser
from tests.support.rollout_files import byte_tokenizer, sample_row, table_of, write_compacted, write_step
from tests.support.watching import watching

HOSTILE = (
    "</script><script>window.hit = 1</script><b>bold</b> <img src=x onerror='window.hit = 1'> &amp; "
    "\u202egnp.exe\u202c \u200bzero\x00nul\x1b[31m 👩\u200d👩 שלום e\u0301\tend"
)
SHOWN = HOSTILE.replace("\u202e", "U+202E").replace("\u202c", "U+202C").replace("\u200b", "U+200B")
SHOWN = SHOWN.replace("\x00", "NUL").replace("\x1b", "ESC").replace("\t", "→\t")
MEGABYTE = "x" * 2**20


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "outputs"
    for name in ("plain", "hostile", "one", "empty", "long", "nameless"):
        (folder / name / "rollouts").mkdir(parents=True)
        (folder / name / "metrics.jsonl").write_text("")
        if name != "nameless":
            byte_tokenizer().save(str(folder / name / "rollouts" / "tokenizer.json"))
    steps = [table_of(plain_step(step)) for step in range(1, 13)]
    write_compacted(folder / "plain" / "rollouts", 1, 10, steps[:10])
    for step in (11, 12):
        write_step(folder / "plain" / "rollouts", step, steps[step - 1])
    rows = [
        sample_row(1, 0, HOSTILE, HOSTILE, label=HOSTILE),
        sample_row(1, 1, "p", MEGABYTE, tokens=[1, 2], mask=[True]),
    ]
    rows[1] |= {name: [0.0] for name in ("kl", "advantages", "logprobs", "sampler_logprobs")} | {"prompt_tokens": 1}
    rows[1] |= {"weights_versions": [0], "turns": []}
    write_step(folder / "hostile" / "rollouts", 1, table_of(rows))
    for name in ("one", "nameless"):
        write_step(folder / name / "rollouts", 1, table_of([sample_row(1, 0, "only", "sample")]))
    write_step(folder / "long" / "rollouts", 1, table_of([sample_row(1, 0, "p" * 400, "word " * 2000)]))
    return folder


def plain_step(step: int) -> list[dict[str, Any]]:
    """Ten samples of five prompts. Sample 3 failed, 4 is truncated, 5 is an episode of two turns."""
    rows = [
        sample_row(
            step, row, f"question {row // 2}?", f"answer {step}.{row}", prompt_id=row // 2, reward=step + row / 10
        )
        for row in range(10)
    ]
    for row in rows:
        row["score/helpful"] = row["reward"] / 2
    rows[3] |= {"failed": True, "reward": None}
    rows[4]["finish_reason"] = "length"
    start = rows[5]["prompt_tokens"]
    mask = [True] * 3 + [False] * 2 + [True] * (rows[5]["response_tokens"] - 5)
    turns = [(start, start + 3, "stop"), (start + 5, start + len(mask), "stop")]
    rows[5] |= {
        "mask": mask,
        "turns": [dict(zip(("start", "end", "finish_reason"), turn, strict=True)) for turn in turns],
    }
    return rows


@pytest.fixture(scope="module")
def link(outputs: Path) -> Iterator[str]:
    with watching(outputs) as link:
        yield link


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory, link: str) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as running:
        running.open(link)
        yield running


def go(browser: Browser, view: str, ready: str, **params: object) -> Browser:
    """The view, once an element is there."""
    browser.problems.clear()
    browser.resize(1280, 900)
    address = f"#/{view}?{urlencode(params, doseq=True)}"
    browser.run(
        f"document.querySelector('.view')?.remove(), location.hash === {json.dumps(address)}"
        f" ? window.dispatchEvent(new HashChangeEvent('hashchange')) : location.hash = {json.dumps(address)}"
    )
    browser.wait(f"document.querySelector({json.dumps(ready)}) !== null")
    return browser


def rollouts(browser: Browser, run: str = "plain", ready: str = ".samples tbody tr", **params: object) -> Browser:
    return go(browser, "rollouts", ready, run=f"outputs/{run}", **params)


def sample(browser: Browser, run: str, step: int, row: int, ready: str = ".answers", **params: object) -> Browser:
    return go(browser, "sample", ready, run=f"outputs/{run}", step=step, row=row, **params)


def texts(browser: Browser, selector: str) -> list[str]:
    return browser.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((found) => found.innerText)")


def click(browser: Browser, selector: str, words: str) -> None:
    found = (
        f"[...document.querySelectorAll({json.dumps(selector)})].find((each) => each.innerText === {json.dumps(words)})"
    )
    browser.wait(f"{found} !== undefined")
    browser.run(f"{found}.click()")


def responses(browser: Browser) -> list[str]:
    return texts(browser, ".samples td[data-name=response]")


def test_the_table_begins_with_the_newest_step_and_pages(browser: Browser) -> None:
    rollouts(browser)
    assert responses(browser)[:2] == ["answer 12.0", "answer 12.1"] and len(responses(browser)) == 50
    assert texts(browser, ".facts")[0].startswith("120 samples of 12 steps (1\u201312) · mean reward 6.967")
    assert "10.0 % truncated · 12 failed" in texts(browser, ".facts")[0]
    browser.press("n")
    browser.wait("document.querySelector('.pager')?.innerText.includes('51\u2013100 of 120')")
    assert responses(browser)[0] == "answer 7.0"
    assert browser.problems == []


def test_presets_headings_and_filters_choose_and_order(browser: Browser) -> None:
    rollouts(browser)
    click(browser, ".choices button", "Highest reward")
    browser.wait("document.querySelector('.samples td[data-name=reward]')?.innerText === '12.900'")
    assert responses(browser)[:2] == ["answer 12.9", "answer 12.8"]
    click(browser, ".samples thead button", "reward ↓")
    browser.wait("document.querySelector('.samples td[data-name=reward]')?.innerText === '1.000'")
    click(browser, ".choices button", "Failed")
    browser.wait("document.querySelector('.facts')?.innerText.startsWith('12 samples')")
    assert set(texts(browser, ".samples td[data-name=reward]")) == {"\u2013"}
    assert texts(browser, ".chip") == ["failed = true \u00d7"]
    browser.run("document.querySelector('.chip').click()")
    browser.wait("document.querySelector('.facts')?.innerText.startsWith('120 samples')")
    browser.run(
        "document.querySelector('[data-name=filter]').open = true, document.querySelector('.filter input').value = '12.7',"
        " document.querySelector('.filter').requestSubmit()"
    )
    browser.wait("document.querySelector('.facts')?.innerText.startsWith('3 samples')")
    assert texts(browser, ".chip") == ["reward ≥ 12.7 \u00d7"]
    assert browser.problems == []


def test_columns_are_chosen(browser: Browser) -> None:
    rollouts(browser)
    assert "score/helpful" not in texts(browser, ".samples th")
    browser.run(
        "[...document.querySelectorAll('.columns label')].find((each) => each.textContent === 'score/helpful').click()"
    )
    browser.wait("[...document.querySelectorAll('.samples th')].some((each) => each.innerText === 'score/helpful')")
    assert texts(browser, "td[data-name='score/helpful']")[:2] == ["6.000", "6.050"]


def test_a_row_opens_by_keyboard_and_its_neighbors_follow_the_tables_order(browser: Browser) -> None:
    rollouts(browser, sort="reward")
    browser.press("j")
    assert browser.run("document.querySelector('tr.current td[data-name=response]').innerText") == "answer 12.8"
    browser.press("Enter")
    for key, place in (("", "12, sample 8"), ("j", "12, sample 7"), ("k", "12, sample 8"), ("k", "12, sample 9")):
        if key:
            browser.wait("[...document.querySelectorAll('.head a')].every((link) => !link.hidden)")
            browser.press(key)
        browser.wait(f"document.querySelector('h1')?.innerText === 'Step {place}'")
    browser.press("Escape")
    browser.wait("document.querySelector('.samples td[data-name=response]')?.innerText === 'answer 12.9'")
    assert browser.problems == []


def test_groups_and_prompts_lead_to_answers_over_the_steps(browser: Browser) -> None:
    rollouts(browser, by="prompt", sort="prompt_id")
    assert texts(browser, "td[data-name='reward change']")[0] == "11.000"
    browser.press("Enter")
    browser.wait("document.querySelectorAll('.answers').length === 5")
    assert [each.split(":")[0] for each in texts(browser, ".prompt h2")][1:] == [
        f"Step {step}" for step in range(12, 7, -1)
    ]
    assert "(+1.000 since step 11)" in texts(browser, ".prompt h2")[1]
    browser.press("m")
    browser.wait("document.querySelectorAll('.answers').length === 10")
    assert browser.run("document.querySelectorAll('svg circle').length") == 12
    rollouts(browser, by="group", sort="step")
    assert len(texts(browser, ".samples tbody tr")) == 50
    assert browser.problems == []


def test_the_search_streams_hits_which_lead_to_samples(browser: Browser) -> None:
    rollouts(browser)
    browser.press("/")
    browser.type("ANSWER 3.")
    browser.wait("document.querySelector('.facts')?.innerText.includes('12 of 12 steps searched')")
    assert texts(browser, ".facts")[0].startswith("10 samples have “ANSWER 3.”")
    assert set(texts(browser, ".hits mark")) == {"answer 3."}
    browser.press("Escape")
    browser.wait("document.querySelector('.samples') !== null")
    browser.press("/")
    browser.type("not there")
    browser.wait("document.querySelector('.view').innerText.includes('No prompt and no response has this text')")
    assert browser.problems == []


def test_a_token_shows_all_its_numbers_and_the_colors_those_of_one(browser: Browser) -> None:
    sample(browser, "plain", 12, 1)
    assert "".join(texts(browser, ".tokens:not(.fixed) .token")) == "answer 12.1<eos>"
    assert browser.run("getComputedStyle(document.querySelector('.view')).backgroundColor") == "rgba(0, 0, 0, 0)"
    assert browser.run("document.querySelector('.choices.colors [aria-pressed=true]').innerText") == "Advantage"
    sides = (
        "[...document.querySelectorAll('.tokens:not(.fixed) .token')].map((token) => token.classList.contains('below'))"
    )
    assert browser.run(sides) == [True] * 5 + [False] * 7  # advantages are k / 100 - 0.05
    for _ in range(3):
        browser.press("ArrowRight")
    numbers = dict(zip(texts(browser, ".numbers dt"), texts(browser, ".numbers dd"), strict=True))
    assert numbers == {
        "place": "response 3", "id": str(byte_tokenizer().token_to_id("s")), "weights": "11", "Advantage": "\u22120.0300",
        "KL": "0.0200", "Sampler gap": "0.2500", "Log-prob": "\u22120.0200", "Sampler log-prob": "\u22120.2700",
    }  # fmt: skip
    browser.press("c")
    assert browser.run("document.querySelector('.choices.colors [aria-pressed=true]').innerText") == "KL"
    assert "Value" not in texts(browser, ".choices.colors button")  # this run has no critic
    assert dict(zip(texts(browser, ".sources dt"), texts(browser, ".sources dd"), strict=True)) == {
        "reward": "12.100", "helpful": "6.050",
    }  # fmt: skip
    assert browser.problems == []


def test_hovering_shows_a_token(browser: Browser) -> None:
    sample(browser, "plain", 12, 1)
    box = browser.run("(({x, y}) => [x, y])(document.querySelector('[data-place=\"13\"]').getBoundingClientRect())")
    browser.command("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + 3, y=box[1] + 5)
    browser.wait("document.querySelector('.inspector h2')?.innerText === 's'")
    assert texts(browser, ".numbers dd")[0] == "response 3"


def test_turns_of_an_episode_and_what_the_environment_said(browser: Browser) -> None:
    sample(browser, "plain", 2, 5)
    heads = texts(browser, ".segment > summary, .segment > h3")
    assert heads == [
        "Prompt · 11 tokens",
        "Turn 1 · 3 tokens · ended by stop",
        "Environment · 2 tokens",
        "Turn 2 · 6 tokens · ended by stop",
    ]
    assert "".join(texts(browser, ".tokens")[2]) == "we"
    assert browser.run("document.querySelectorAll('.tokens.fixed .above, .tokens.fixed .below').length") == 0


def test_the_group_stands_side_by_side(browser: Browser) -> None:
    sample(browser, "plain", 12, 3)
    assert texts(browser, ".answers .text") == ["answer 12.2", "answer 12.3"]
    assert "failed" in texts(browser, ".answer.current .badges")[0]
    click(browser, ".answers a", "sample 2")
    browser.wait("document.querySelector('h1')?.innerText === 'Step 12, sample 2'")


def test_hostile_texts_are_shown_and_never_run(browser: Browser) -> None:
    rollouts(browser, "hostile")
    assert responses(browser)[0].startswith("</script><script>window.hit = 1")
    sample(browser, "hostile", 1, 0)
    assert texts(browser, ".answers .text")[0] == SHOWN
    tokens = browser.run(
        "[...document.querySelectorAll('.tokens:not(.fixed) .token')].map((token) => token.textContent).join('')"
    )
    assert tokens == SHOWN.replace("\u200d", "U+200D") + "<eos>"  # a joiner alone in its token joins nothing
    assert browser.run("document.querySelectorAll('.token.part').length") > 10
    rollouts(browser, "hostile")
    browser.press("/")
    browser.type("<b>")
    browser.wait("document.querySelector('.hits mark') !== null")
    go(browser, "prompt", ".answers", run="outputs/hostile", prompt_id=0)
    assert browser.run("window.hit") is None
    assert browser.run("document.querySelectorAll('#view img, #view script').length") == 0
    assert browser.problems == []


def test_a_line_of_a_megabyte_is_cut_in_tables_and_bearable_in_its_view(browser: Browser) -> None:
    rollouts(browser, "hostile")
    assert browser.run("document.body.textContent.length") < 5000
    sample(browser, "hostile", 1, 1)
    assert "848,576 more characters" in browser.run("document.querySelector('.answers').innerText")
    assert browser.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert browser.problems == []


def test_one_sample_no_samples_and_no_tokenizer(browser: Browser) -> None:
    rollouts(browser, "one")
    assert texts(browser, ".facts")[0].startswith("1 sample of step 1")
    sample(browser, "one", 1, 0)
    assert "The only sample of its group" in texts(browser, "h2")
    sample(browser, "nameless", 1, 0, ready="h2")
    assert texts(browser, ".view .text")[:2] == ["only", "sample"]
    assert "no tokenizer" in texts(browser, ".note")[0]
    sample(browser, "one", 9, 0, ready=".failure")
    assert texts(browser, ".failure") == [
        "sample 0 of step 9 is not recorded (any more): look at the steps in the table of rollouts"
    ]


def test_thousands_of_tokens_come_in_windows(browser: Browser) -> None:
    sample(browser, "long", 1, 0)
    assert browser.run("document.querySelectorAll('.token').length") == 4000
    assert not browser.run("document.querySelector('.segment').open")  # a long prompt is folded
    click(browser, ".pager a", "tokens after →")
    browser.wait("document.querySelector('.pager')?.innerText.includes('tokens 4,001\u20138,000 of 10,401')")
    assert browser.run("document.querySelectorAll('.token').length") == 4000
    assert browser.problems == []


def test_a_step_that_is_recorded_meanwhile_appears(browser: Browser, outputs: Path) -> None:
    rollouts(browser, "one")
    write_step(outputs / "one" / "rollouts", 2, table_of([sample_row(2, 0, "only", "fresh")]))
    browser.wait("document.querySelector('td[data-name=response]')?.innerText === 'fresh'")
    assert texts(browser, ".facts")[0].startswith("2 samples of 2 steps")


def test_a_client_that_hangs_up_ends_its_search(link: str) -> None:
    base, _, token = link.partition("?token=")
    asked = urllib.request.Request(
        f"{base}api/search?{urlencode({'run': 'outputs/plain', 'q': 'answer'})}",
        headers={"Authorization": f"Bearer {token}"},
    )
    for _ in range(5):  # more than there are threads for searches
        with urllib.request.urlopen(asked, timeout=30) as answer:
            assert json.loads(answer.readline())["of"] == 12
    with urllib.request.urlopen(asked, timeout=30) as answer:
        assert answer.headers["Content-Type"] == "application/x-ndjson"
        assert json.loads(answer.read().splitlines()[-1])["hits"] == 120


@pytest.mark.parametrize("path", ["rollouts", "sample", "search", "group", "prompt", "compare"])
def test_an_unknown_run_is_a_sentence(link: str, path: str) -> None:
    base, _, token = link.partition("?token=")
    asked = urllib.request.Request(f"{base}api/{path}?run=none", headers={"Authorization": f"Bearer {token}"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(asked, timeout=30)
    assert refused.value.code == 404
    assert re.fullmatch(r"there is no run none .*", json.load(refused.value)["error"])


@pytest.mark.parametrize("dark", [False, True])
def test_narrow_windows_and_both_schemes(browser: Browser, dark: bool) -> None:
    browser.dark(dark)
    try:
        for show in (
            lambda: rollouts(browser),
            lambda: sample(browser, "plain", 12, 1),
            lambda: go(browser, "prompt", ".answers", run="outputs/plain", prompt_id=1),
        ):
            show()
            browser.resize(400, 800)
            assert browser.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        shades = (
            "getComputedStyle(document.documentElement).backgroundColor.match(/\\d+/g).slice(0, 3).every((c) => c < 60)"
        )
        assert browser.run(shades) == dark
    finally:
        browser.dark(False)
