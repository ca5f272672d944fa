"""The page's shell in a real browser, and its door."""

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.browser import Browser
from tests.support.certificates import certificate
from tests.support.strangers import crowd
from tests.support.watching import watcher, watching

RUN = "a run\u202e%<b>"


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("outputs")
    (folder / RUN).mkdir()
    (folder / RUN / "metrics.jsonl").write_text('{"step": 1}\n')
    with watching(folder) as link:
        yield link


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


def fetch(link: str, path: str = "", **headers: str) -> tuple[int, str]:
    """Status and body, with the link's token unless a header says otherwise."""
    base, _, token = link.partition("?token=")
    given = {"Authorization": f"Bearer {token}", **headers}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{base}{path}", headers=given), timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_link_opens_the_page_and_leaves_no_token_in_the_address(browser: Browser, link: str) -> None:
    browser.open(link)
    browser.wait("document.querySelector('.view.runs')?.innerText.includes('a run')")
    assert browser.run("location.search + document.cookie") == ""
    assert browser.run("document.querySelectorAll('b').length") == 0
    browser.press("?")
    assert "these keys" in browser.run("document.querySelector('dialog[open]').innerText")
    browser.press("Escape")
    assert browser.problems == []


def test_a_run_id_is_printable(link: str) -> None:
    status, body = fetch(link, "api/runs")
    (run,) = json.loads(body)["runs"]
    assert status == 200 and run["id"].endswith("/a run%E2%80%AE%25<b>")


@pytest.mark.parametrize("path", ["", "app.js", "api/runs", "api/nothing"])
@pytest.mark.parametrize(
    ("headers", "status", "words"),
    [
        ({"Authorization": "Bearer wrong"}, 401, "wants its token"),
        ({"Host": "evil.example"}, 403, "answers only under"),
        ({"Host": "evil.example:80"}, 403, "answers only under"),
    ],
)
def test_strangers_get_nothing(link: str, path: str, headers: dict[str, str], status: int, words: str) -> None:
    found, body = fetch(link, path, **headers)
    assert found == status and words in body and "a run" not in body


def test_strangers_hold_nobody_up_and_fill_no_log(tmp_path: Path) -> None:
    with watcher(tmp_path) as (link, process):
        crowd(urlsplit(link).port or 0, process.pid, lambda: fetch(link, "api/runs")[1].index("runs"))
        process.kill()
        assert process.stdout is not None and len(process.stdout.read()) < 1000


def test_the_form_takes_the_token(browser: Browser, link: str) -> None:
    base, _, token = link.partition("?token=")
    browser.command("Network.clearBrowserCookies")
    browser.open(base)
    browser.problems.clear()  # the browser reports the status 401
    browser.run(f"document.querySelector('input').value = '{token}', document.querySelector('form').submit()")
    browser.wait("document.querySelector('.view.runs')?.innerText.includes('a run')")
    assert browser.problems == []


def test_beyond_loopback_the_token_is_the_users_and_is_not_printed(tmp_path: Path) -> None:
    own = certificate(tmp_path, "page")
    (tmp_path / "token").write_text("of the user\n")
    (tmp_path / "token").chmod(0o600)
    options = (
        "--host=0.0.0.0",
        f"--token-file={tmp_path / 'token'}",
        f"--certificate={own}",
        f"--key={own.with_suffix('.key')}",
    )
    context = ssl.create_default_context(cafile=own)
    with watching(tmp_path, options=options) as link:
        assert link.startswith("https://0.0.0.0:") and link.endswith("/")
        address = link.replace("0.0.0.0", "127.0.0.1") + "api/runs"
        found = []
        for token in ("of the user", "of the use", ""):
            request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})
            try:
                with urllib.request.urlopen(request, timeout=10, context=context) as answer:
                    found.append(answer.status)
            except urllib.error.HTTPError as error:
                found.append(error.code)
    assert found == [200, 401, 401]


@pytest.mark.parametrize("path", ["", "app.js", "api/runs", "api/run/none/metrics"])
def test_every_answer_forbids_what_the_page_does_not_need(link: str, path: str) -> None:
    base, _, token = link.partition("?token=")
    request = urllib.request.Request(f"{base}{path}", headers={"Authorization": f"Bearer {token}"})
    try:
        headers = urllib.request.urlopen(request, timeout=10).headers
    except urllib.error.HTTPError as error:
        headers = error.headers
    policy = headers["Content-Security-Policy"]
    assert (
        policy.startswith("default-src 'none'; script-src 'self';") and "unsafe" not in policy and "http" not in policy
    )
    assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")


@pytest.mark.parametrize("path", ["../server.py", "%2e%2e/server.py", "vendor/../../door.py", "//etc/passwd", "vendor"])
def test_files_beside_the_page_stay_there(link: str, path: str) -> None:
    status, body = fetch(link, path)
    assert status in (403, 404) and "import" not in body and "its terminal" not in body


@pytest.mark.parametrize(
    ("path", "status", "sentence"),
    [
        ("api/run/none/metrics", 404, "there is no run none (any more): look at the list of runs"),
        ("api/run/none/steps?last=x", 400, "last is no whole number"),
        ("api/config?run=100%25s", 404, "there is no run 100%25s (any more): look at the list of runs"),
    ],
)
def test_a_mistake_in_an_address_is_a_sentence_in_json(link: str, path: str, status: int, sentence: str) -> None:
    found, body = fetch(link, path)
    assert (found, json.loads(body)) == (status, {"error": sentence})
