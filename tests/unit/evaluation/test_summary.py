"""The numbers of an evaluation against ones worked out by hand."""

import json
import math

import pytest

from nemo_style_rlhf.evaluation.samples import Sample, to_jsonl
from nemo_style_rlhf.evaluation.summary import summarize, win_rate


def sample(prompt_id: int, score: float | None, *, index: int = 0, length: int = 4, **other) -> Sample:
    given = {"response": f"r{prompt_id}", "finish_reason": "stop", "checkpoint": "c", **other}
    return Sample(prompt_id=prompt_id, index=index, seed=7, prompt="p", length=length, score=score, **given)


def test_the_standard_error_counts_prompts_not_responses():
    """Prompt means 1, 3 and 8: their mean is 4, their variance (9 + 1 + 16) / 2 = 13, hence sqrt(13 / 3)."""
    scores = {0: (0.0, 2.0), 1: (3.0, 3.0), 2: (7.0, 9.0)}
    samples = [sample(prompt, s, index=i) for prompt, pair in scores.items() for i, s in enumerate(pair)]
    summary = summarize("c", "path", samples, None)
    assert summary.mean_score == 4.0
    assert summary.standard_error == pytest.approx(math.sqrt(13 / 3))
    assert summary.samples == 6
    assert summary.win_rate is None


def test_prompts_count_alike_however_many_of_their_responses_have_a_score():
    samples = [sample(0, 1.0), sample(0, None, index=1), sample(1, 3.0), sample(1, 5.0, index=1)]
    summary = summarize("c", "path", samples, None)
    assert summary.mean_score == 2.5  # of 1 and 4, not of 1, 3 and 5
    assert summary.unscored == 1


def test_a_win_needs_the_same_prompt_and_the_same_seed_and_a_tie_is_half():
    first = [sample(0, 1.0), sample(0, 2.0, index=1), sample(1, 5.0), sample(2, None)]
    other = [sample(0, 2.0), sample(0, 2.0, index=1), sample(1, 4.0), sample(2, 9.0), sample(3, 9.0)]
    assert win_rate(other, first) == pytest.approx((1 + 0.5 + 0) / 3)
    assert win_rate(first, other) == pytest.approx((0 + 0.5 + 1) / 3)
    assert win_rate(first, first) == 0.5
    assert win_rate([sample(3, 9.0)], first) is None


def test_lengths_truncation_and_distinct_responses():
    samples = [sample(0, None, response="a", length=2), sample(1, None, response="a", length=4, finish_reason="length"),
               sample(2, None, response="b", length=9), sample(3, None, response="", length=1)]  # fmt: skip
    summary = summarize("c", "path", samples, None)
    assert (summary.mean_length, summary.truncated_fraction, summary.distinct_responses) == (4.0, 0.25, 3)
    assert (summary.mean_score, summary.standard_error, summary.unscored) == (None, None, 0)


def test_one_prompt_has_a_mean_but_no_standard_error():
    assert summarize("c", "path", [sample(0, 1.0)], None).standard_error is None


def test_a_line_of_the_results_is_one_object_whatever_the_text():
    text = 'a\n"b"\u2028</script> ü'
    lines = to_jsonl([sample(3, 0.5, response=text, label="42", extra={"f/x": 1.0})]).split("\n")
    assert len(lines) == 2
    assert json.loads(lines[0]) == {
        "prompt_id": 3, "checkpoint": "c", "sample": 0, "seed": 7, "prompt": "p", "response": text, "score": 0.5,
        "length": 4, "finish_reason": "stop", "label": "42", "extra": {"f/x": 1.0},
    }  # fmt: skip
    assert json.loads(to_jsonl([sample(3, None)]))["score"] is None
