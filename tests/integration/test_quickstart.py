"""`make quickstart` does what the README says, by the numbers."""

import json
import re

from tests.support.terminal import unknown_lines

SAID = [
    "making data: .*", "training the (policy|reward model) .*", "answering held-out prompts (before|after) PPO",
    r"PPO: critic server and actor", r"  \d+ s(, held-out .*)?", r"(critic|actor): log in /\S+", r"(critic|actor): .* INFO .*",
    "loading", r"(critic|actor): [\w ]+(; actor: [\w ]+)?",
    r"written: /\S+, /\S+", "next: .*", "every token of PPO .*",
    r" *(\d+ samples on held-out prompts|Samples) *", "[ ┏┃┡│└├┼─━╇┳┓┩┴┤┘].*",
]  # fmt: skip
"""Regular expressions of the example's own lines, and of its tables."""


def test_the_policy_becomes_pleasant_without_collapsing(quickstart):
    summary = json.loads((quickstart / "summary.json").read_text())
    assert 0.35 < summary["gold_before"] < 0.65
    assert summary["gold_after"] >= 0.9
    assert summary["reward_after"] > summary["reward_before"]
    assert 0 < summary["kl_per_token"] < 0.3
    assert summary["distinct_after"] >= 0.8 * summary["distinct_before"]
    assert summary["grammatical_after"] >= 0.95


def test_it_draws_its_curves_and_leaves_no_process_behind(quickstart):
    assert (quickstart / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (quickstart / "left_behind.txt").read_text() == ""


def test_every_line_on_the_terminal_and_in_the_logs_is_one_that_somebody_meant(quickstart):
    assert unknown_lines((quickstart / "terminal.txt").read_text(), *SAID) == []
    for log in ("actor.log", "critic.log"):
        lines = (quickstart / log).read_text()
        assert len(lines.splitlines()) > 3 and unknown_lines(lines) == []


def test_every_stage_shows_its_progress_and_says_what_comes_next(quickstart):
    lines = (quickstart / "terminal.txt").read_text()
    for stage in ("SFT: 375 steps", "reward model: "):
        assert f"INFO {stage}" in lines
    assert lines.count("; next: ") == 2
    assert re.search(
        r"^next: \S+ \S+/evaluate.py .*data.path=\S+prompts_validation.jsonl reward.model.path=", lines, re.M
    )
    assert re.search(r"^every token of PPO in the browser: \S+ trainers/watch.py /\S+$", lines, re.M)
