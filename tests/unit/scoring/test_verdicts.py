"""Answers of judges, as models write them and as nobody would."""

import contextlib
import json
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_style_rlhf.schema.judge import VerdictConfig
from nemo_style_rlhf.scoring.verdicts import Unreadable, read_verdict

NUMBERS = {
    "8": 8.0, " 8. ": 8.0, "8/10": 8.0, "Score: 8/10": 8.0, "**Score:** 7": 7.0, "[[7]]": 7.0, "Rating = -2.5": -2.5,
    "1. It is good.\nScore is 5": 5.0, "Score: 7\nNo, score: 6": 6.0, "Score: 3. The answer 5 is wrong": 3.0, '"score": 4.5': 4.5,
    "SCORE IS `9`": 9.0, "Score: 8\n- 3 issues found": 8.0, "Score (1-10): 7": 7.0, "**Rating** [0 to 5] = 4": 4.0,
    "Score (out of ten): [[6]]": 6.0,
}  # fmt: skip
NO_NUMBERS = [
    "",
    "nan",
    "I say 3",
    "Score (1-10)",
    "A score of 9 would be too high",
    "Score: 1,000",
    "Score: 1e5",
    "Score: 3-5",
    "8 or 9",
    "score",
]
CHOICES = {
    "A": 1.0,
    "(B)": 0.0,
    "[[A]]": 1.0,
    "Verdict: B": 0.0,
    "The winner is **A**.": 1.0,
    "Verdict: A\nVerdict: B": 0.0,
}
NO_CHOICES = ["", "The choice of A would be wrong, since B is right.", "A good answer", "a", "C", "Verdict: Both", "AB"]
OBJECTS = {
    '{"score": 3}': 3.0, 'Sure:\n```json\n{"score": true}\n```\n{"why": {}}': 1.0, '{"score": "2.5"}': 2.5, '{"score": "B"}': 0.0,
    '{broken {"score": 1}': 1.0, '{"score": 1} {"score": 2}': 2.0,
}  # fmt: skip
NO_OBJECTS = [
    "", "7", '{"points": 7}', '{"score": null}', '{"score": [1]}', '{"score": NaN}', '{"score": 1' + 400 * "0" + "}",
    '{"score": 1' + 5000 * "0" + "}", '{"a": {"score": 1}}', "{" * 3000, '{"a":' * 3000, '{"score": "seven"}', '[{"score": 1',
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "answer", "reward"),
    [
        (kind, *each)
        for kind, cases in (("number", NUMBERS), ("choice", CHOICES), ("json", OBJECTS))
        for each in cases.items()
    ],
)
def test_a_verdict_is_found(kind: str, answer: str, reward: float) -> None:
    assert read_verdict(answer, VerdictConfig(kind)) == reward


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        (kind, each)
        for kind, cases in (("number", NO_NUMBERS), ("choice", NO_CHOICES), ("json", NO_OBJECTS))
        for each in cases
    ],
)
def test_what_is_no_verdict_is_not_guessed(kind: str, answer: str) -> None:
    with pytest.raises(Unreadable, match="expected "):
        read_verdict(answer, VerdictConfig(kind))


@pytest.mark.parametrize(("number", "reward"), [("1", 0.0), ("5", 1.0), ("4", 0.75), ("0", None), ("5.1", None)])
def test_a_scale_makes_rewards_from_0_to_1_and_what_lies_outside_is_no_verdict(
    number: str, reward: float | None
) -> None:
    config = VerdictConfig(low=1.0, high=5.0)
    if reward is not None:
        assert read_verdict(number, config) == reward
    else:
        with pytest.raises(Unreadable, match=rf"^expected a number from 1 to 5, not {number}$"):
            read_verdict(number, config)


def test_own_patterns_and_choices_are_heeded() -> None:
    assert read_verdict("w12 then w7", VerdictConfig(pattern=r"w(\d+)")) == 7.0
    assert read_verdict("3 of 4", VerdictConfig(pattern=r"(\d+) of|of (\d+)")) == 3.0
    choices = VerdictConfig("choice", choices={"good": 1.0, "goodish": 0.5, "bad": -1.0})
    assert [read_verdict(f"Grade: {word}", choices) for word in ("goodish", "good", "bad")] == [0.5, 1.0, -1.0]
    assert read_verdict("it is good ", VerdictConfig("choice", pattern=r"\w+ \Z", choices={"good": 2.0})) == 2.0
    with pytest.raises(Unreadable, match=r"^expected one of good, not 'bad'"):
        read_verdict("it is bad ", VerdictConfig("choice", pattern=r"\w+ \Z", choices={"good": 2.0}))


WORDS = ["score", "Score: ", '"score":', "7", "9", "e9", "nan", "A", "B", "٣", "²"]
MARKS = ["[[", "]]", "{", "}", "-", ".", "/", ",", " ", "\n", "*", '"', "\\"]
ANSWERS = st.one_of(st.text(), st.lists(st.sampled_from(WORDS + MARKS), max_size=30).map("".join))


def read(answer: str, config: VerdictConfig) -> float | None:
    """Nothing else may be raised."""
    with contextlib.suppress(Unreadable):
        return read_verdict(answer, config)
    return None


@given(ANSWERS, st.sampled_from(["number", "choice", "json"]), st.booleans())
def test_any_answer_gives_a_number_of_its_scale_or_none(answer: str, kind: str, scaled: bool) -> None:
    config = VerdictConfig(kind, low=0.0 if scaled else None, high=10.0 if scaled else None)
    reward = read(answer, config)
    if reward is not None:
        assert isinstance(reward, float) and math.isfinite(reward)
        assert 0 <= reward <= 1 or not scaled
        assert kind != "choice" or reward in (0.0, 1.0)


@given(
    st.text(alphabet=st.characters(exclude_categories=("Cs",))),
    st.floats(-1e6, 1e6).map(lambda number: round(number, 3)),
)
def test_a_verdict_after_any_reasoning_is_found(reasoning: str, number: float) -> None:
    written = f"{number:.3f}"
    assert read_verdict(f"{reasoning}\nScore: {written}", VerdictConfig()) == float(written)
    with_json = f"{reasoning.replace('{', '(')}\n{json.dumps({'score': number, 'why': reasoning})}"
    assert read_verdict(with_json, VerdictConfig("json")) == number


@given(st.text(alphabet="[score: *`\"'(\\1-", max_size=400), st.sampled_from(["number", "choice", "json"]))
def test_a_long_answer_is_read_at_once(piece: str, kind: str) -> None:
    """No pattern of ours backtracks for long."""
    began = time.process_time()
    read(piece * 50, VerdictConfig(kind))
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    "piece", ["score" + " " * 200, "[" * 200, "1" * 200, "{" * 50, '{"a":', '{"score":', "score:" + "*" * 100]
)
def test_an_answer_of_one_piece_is_read_at_once(piece: str) -> None:
    for kind in ("number", "choice", "json"):
        began = time.process_time()
        read(piece * (20000 // len(piece)), VerdictConfig(kind))
        assert time.process_time() - began < 2.0
