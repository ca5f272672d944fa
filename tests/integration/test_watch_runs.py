"""trainers/watch.py in a real browser, beside a real run: before it starts, while it trains, after a kill, to its end."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ppo_runs
from tests.support.browser import Browser
from tests.support.metrics import metrics
from tests.support.paths import ROOT
from tests.support.processes import start_actor, start_server
from tests.support.watching import watching

STEPS = 10
TABLE = "document.querySelector('.runs-table')?.innerText ?? ''"
HOSTILE = "<img src=x onerror=alert(1)>\u202egnp\u2066 \U0001f9e8</script><script>alert(2)</script>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture(scope="module")
def seen(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The page's text, without a reload, at each stage of the life of the run below ``seen["folder"]``."""
    folder = tmp_path_factory.mktemp("outputs")
    inputs = ppo_runs.save_inputs(tmp_path_factory.mktemp("inputs") / "inputs")
    overrides = [
        *ppo_runs.actor_overrides(inputs),
        "generation=hf",
        f"algorithm.max_steps={STEPS}",
        "tracking.tensorboard=false",
        "audit.health.min_entropy=99",
    ]
    stages = {"folder": str(folder)}
    with watching(folder) as link:
        browser.open(link)
        browser.wait("document.querySelector('.view')?.innerText.includes('no run here yet')")
        critic, port = start_server(folder / "critic", *ppo_runs.server_overrides(inputs))
        actor = start_actor(folder / "actor", port, *overrides)
        try:
            browser.wait(f"/running.*\\s[2-8] \\/ {STEPS}/.test({TABLE})")
            browser.wait("document.body.innerText.includes('train_rollouts/rewards')")
            stages["running"] = browser.run("document.body.innerText")
            actor.kill()
            browser.wait(f"{TABLE}.includes('died')")
            stages["died"] = browser.run("document.body.innerText")
            actor = start_actor(folder / "actor", port, *overrides, "engine.optim.lr=3e-3")
            browser.wait(f"/finished.*\\s{STEPS} \\/ {STEPS}/.test({TABLE})")
            last = metrics(folder / "actor")[-1]
            browser.wait(f"{TABLE}.includes('{last['train_rollouts/rewards']:.4g}')")
            stages["finished"] = browser.run("document.body.innerText")
            assert actor.wait(60) == 0
        finally:
            actor.kill()
            assert critic.terminate() == 0
        assert browser.problems == []
        browser.open("about:blank")
    return stages


@pytest.fixture(scope="module")
def outputs(seen: dict[str, str]) -> Path:
    """The finished run, with hostile names beside it."""
    folder = Path(seen["folder"])
    hostile = folder / HOSTILE.replace("/", "\u2215")
    shutil.copytree(folder / "actor", hostile)
    rows = [row | {HOSTILE: float(row["step"])} for row in metrics(folder / "actor")]
    (hostile / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 7, "train_ro')
    with (hostile / "events.jsonl").open("a") as file:
        for text in (HOSTILE, "x" * 2**20):
            file.write(json.dumps({"step": 3, "kind": "health", "sentence": text, "metric": HOSTILE}) + "\n")
    config = (hostile / "config.yaml").read_text().replace("kl_in: reward", f"kl_in: {json.dumps(HOSTILE[:30])}")
    (hostile / "config.yaml").write_text(config)
    (folder / "empty").mkdir()
    (folder / "empty" / "config.yaml").write_text("")
    return folder


@pytest.fixture(scope="module")
def link(outputs: Path) -> Iterator[str]:
    with watching(outputs) as link:
        yield link


@pytest.fixture
def page(browser: Browser, link: str) -> Browser:
    browser.resize(1280, 900)
    browser.dark(False)
    browser.problems.clear()
    browser.open(link)
    browser.wait("document.querySelector('.view')?.children.length > 0")
    return browser


def go(page: Browser, address: str, ready: str) -> None:
    page.run(f"location.hash = {json.dumps(address)}, 0")
    page.wait(f"document.querySelector({json.dumps(ready)}) !== null")


def test_the_page_follows_a_run_through_its_life(seen: dict[str, str]) -> None:
    assert "train_rollouts/rewards" in seen["running"] and "stopped" not in seen["running"]
    assert "running" in seen["died"]  # the critic goes on
    assert "finished" in seen["finished"] and "died" not in seen["finished"]
    for stage in ("running", "died", "finished"):
        assert "▲ step 1 train_rollouts/entropy=" in seen[stage] and "below audit.health.min_entropy=99" in seen[stage]


def test_charts_show_the_last_values_and_those_under_a_common_cursor(page: Browser, outputs: Path) -> None:
    run = f"{outputs.name}/actor"
    go(page, f"#/runs?run={run}", ".chart canvas")
    rewards = {row["step"]: row["train_rollouts/rewards"] for row in metrics(outputs / "actor") if row["step"]}
    shown = "[...document.querySelectorAll('.chart')].map((chart) => chart.querySelector('.values').innerText)"
    assert float(page.run(f"{shown}[0]")) == pytest.approx(rewards[STEPS], rel=1e-3)
    box = page.run(
        "(({x, y, height}) => [x, y + height / 2])(document.querySelector('.chart .u-over').getBoundingClientRect())"
    )
    page.command("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + 2, y=box[1])
    page.wait(f"{shown}[0].startsWith('step 1')")
    step, value = page.run(f"{shown}[0]").split("\n")
    assert step == "step 1" and float(value) == pytest.approx(rewards[1], rel=1e-3)
    page.wait(f"{shown}.filter((text) => text.startsWith('step')).length > 3")


def test_several_runs_and_the_keys_in_which_they_differ(page: Browser, outputs: Path) -> None:
    go(page, f"#/runs?run={outputs.name}/actor&run={outputs.name}/critic", ".config table")
    text = page.run("document.querySelector('.config').innerText")
    assert "value_model.loss_clip_val\tnot there\t0.2" in text
    assert "changed by the start after step" in text and "engine.optim.lr\t0.002\t0.003" in text


def test_smoothing_and_the_choice_of_metrics_are_part_of_the_address(page: Browser, outputs: Path) -> None:
    go(page, f"#/runs?run={outputs.name}/actor", ".chart")
    page.press("]")
    page.press("/")
    page.type("memory/")
    page.wait("document.querySelectorAll('.chart').length === 2")
    assert page.run("location.hash").endswith("smooth=0.1&metric=memory%2F")
    names = page.run("[...document.querySelectorAll('.chart .name')].map((name) => name.innerText).join()")
    assert names == "memory/critic_rss_gib,memory/actor_rss_gib"


def test_keys_walk_through_the_runs_and_choose_them(page: Browser, outputs: Path) -> None:
    go(page, f"#/runs?run={outputs.name}/actor", ".chart")
    page.press("j")
    page.press(" ")
    page.wait("new URLSearchParams(location.hash.split('?')[1]).getAll('run').length === 2")
    page.press("2")
    page.wait("document.querySelector('.timeline .step') !== null")
    assert page.problems == []


def test_the_timeline_shows_both_processes_on_one_scale(page: Browser, outputs: Path) -> None:
    go(page, f"#/timeline?run={outputs.name}/actor", ".timeline .step")
    assert page.run("document.querySelectorAll('.timeline .step').length") == STEPS
    labels = page.run("[...document.querySelectorAll('.lane')].slice(0, 2).map((lane) => lane.ariaLabel)")
    last = metrics(outputs / "actor")[-1]
    assert labels[0].startswith("actor: generate ") and "wait_for_critic" in labels[0]
    assert labels[1].startswith("critic: critic_infer ") and "critic_train" in labels[1]
    widths = page.run(
        "[...document.querySelectorAll('.step:first-child .lane:first-child .span')].map((span) => parseFloat(span.style.width))"
    )
    longest = max(row["timers/step"] for row in metrics(outputs / "actor")[1:])
    assert sum(widths) == pytest.approx(100 * last["timers/step"] / longest, rel=0.02)
    assert "GiB" in page.run("document.querySelector('.facts').innerText")


def test_sampling_beside_the_training_has_a_lane_of_its_own(page: Browser, tmp_path: Path) -> None:
    laps = {"wait_for_rollout": 1.0, "logprobs": 1.0, "wait_for_scores": 0.5, "actor_update": 1.5, "step": 4.0}
    beside = {"beside_idle": 0.2, "beside_sampling": 3.0, "critic_train": 2.0}
    row = {"step": 1, **{f"timers/{name}": seconds for name, seconds in {**laps, **beside}.items()}}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "run" / "config.yaml").write_text("algorithm: {max_steps: 1}\n")
    with watching(tmp_path / "run") as link:
        page.open(link)
        go(page, "#/timeline", ".timeline .step")
        labels = page.run("[...document.querySelectorAll('.lane')].map((lane) => lane.ariaLabel)")
        left = page.run("document.querySelector('.track .phase-train').style.left")
        facts = page.run("document.querySelector('.facts').innerText")
        page.open("about:blank")
    assert labels == [
        "actor: wait_for_rollout 1 s, logprobs 1 s, wait_for_scores 0.5 s, actor_update 1.5 s",
        "critic: critic_train 2 s",
        "engines: beside_sampling 3 s",
    ]
    assert float(left.removesuffix("%")) == pytest.approx(100 * 2.5 / 4.5)  # the critic trains for longer than the step
    assert "the actor waited 38 % of the time" in facts


def test_hostile_names_and_sentences_are_text(page: Browser, outputs: Path) -> None:
    names = page.run("[...document.querySelectorAll('.runs-table input')].map((input) => input.value)")
    (hostile,) = (name for name in names if "onerror" in name)
    assert hostile.isprintable() and "%E2%80%AE" in hostile
    page.run(f"location.hash = '#/runs?' + new URLSearchParams([['run', {json.dumps(hostile)}]]), 0")
    page.wait("[...document.querySelectorAll('.chart .name')].some((name) => name.textContent.includes('onerror'))")
    page.wait("document.querySelector('.notes')?.innerText.includes('onerror')")
    assert page.run("document.querySelectorAll('img, script:not([src])').length") == 0
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    assert page.problems == []


def test_a_run_that_is_not_there_gets_a_sentence(page: Browser) -> None:
    go(page, "#/runs?run=gone", ".failure")
    assert page.run("document.querySelector('.failure').innerText").startswith("there is no run gone")
    page.problems.clear()  # the browser reports the status 404


def test_a_run_without_anything_is_shown_as_new(page: Browser, outputs: Path) -> None:
    assert f"{outputs.name}/empty" in page.run(TABLE) and "no step yet" in page.run(TABLE)
    go(page, f"#/runs?run={outputs.name}/empty", ".board .empty")
    assert page.run("document.querySelector('.board').innerText") == "Nothing has been logged yet."


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("view", ["runs", "timeline"])
def test_views_fit_their_window(
    page: Browser, outputs: Path, tmp_path: Path, view: str, width: int, dark: bool
) -> None:
    """Screenshots for people lie in this test's folder."""
    page.resize(width, 900)
    page.dark(dark)
    ready = {"runs": ".chart canvas", "timeline": ".timeline .step"}[view]
    go(page, f"#/{view}?run={outputs.name}/actor&run={outputs.name}/critic", ready)
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    assert page.run(
        "[...document.querySelectorAll('.chart, .track')].every((each) => each.getBoundingClientRect().right <= innerWidth)"
    )
    page.screenshot(tmp_path / f"{view}.png")
    assert page.problems == []


def test_a_report_is_one_file_that_needs_no_server(browser: Browser, outputs: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    command = [sys.executable, ROOT / "trainers" / "watch.py", outputs, f"--export={report}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith(f"wrote {report} (") and done.stderr == ""
    browser.resize(1280, 900)
    browser.problems.clear()
    browser.open(report)
    go(browser, f"#/runs?run={outputs.name}/actor&run={outputs.name}/critic", ".config table")
    browser.wait("document.querySelector('.chart canvas') !== null")
    assert "report of 20" in browser.run("document.querySelector('#status').innerText")
    assert browser.run("document.querySelectorAll('img').length") == 0
    go(browser, f"#/timeline?run={outputs.name}/actor", ".timeline .step")
    browser.screenshot(tmp_path / "report.png")
    assert browser.problems == []
