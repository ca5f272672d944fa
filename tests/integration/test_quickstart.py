"""`make quickstart` does what the README says, by the numbers."""

import json


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
