"""The ready-made reward functions, on real data where it is there."""

import json
import time
from pathlib import Path

import pytest

from nemo_style_rlhf.schema.reward import FunctionRewardConfig
from nemo_style_rlhf.scoring.function import FunctionScorer
from nemo_style_rlhf.scoring.interface import ScoringSample
from tests.support.example_rewards import PROMPT, REWARDS, load, rewards_of
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow("each runs programs in a sandbox")

DATA = ROOT.parent / "shared" / "data"
GSM8K = DATA / "gsm8k" / "test.jsonl"
VADER = DATA / "vader" / "vader_lexicon.txt"


@pytest.fixture(scope="module")
def math_answers():
    return load("math_answers")


@pytest.fixture(scope="module")
def code_tests():
    return load("code_tests")


@pytest.fixture
def sentiment():
    return load("sentiment")


# --- mathematics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "response, label, reward",
    [
        ("#### 42", "steps 3 + 39\n#### 42", 1.0),
        ("#### 41", "steps 3 + 39\n#### 42", 0.0),
        ("first #### 41 then #### 42", "42", 1.0),
        ("#### $1,080.", "#### 1080", 1.0),
        ("#### 1,080 eggs", "1080", 1.0),
        ("#### **18**\nMore 19 words", "18", 1.0),
        ("####", "18", 0.0),
        ("so \\boxed{\\frac{1}{2}} of 7", "0.5", 1.0),
        ("\\boxed{4} no, \\boxed{5}", "5", 1.0),
        ("\\boxed{4} no, \\boxed{5}", "4", 0.0),
        ("\\boxed{\\sqrt{12}}", "2\\sqrt{3}", 1.0),
        ("\\boxed{x + 1}", "\\boxed{1 + x}", 1.0),
        ("\\boxed{\\text{none}}", "3", 0.0),
        ("12 apples and 30 pears make 42.", "42", 1.0),
        ("12 apples and 30 pears make 42.", "30", 0.0),
        ("that is 1,450,000 dollars", "1450000", 1.0),
        ("#### 1e3", "1000", 1.0),
        ("about 2.5e-1 of it", "0.25", 1.0),
        ("\\boxed{1\\,234}", "1234", 1.0),
        ("it is 1\\,234", "#### 1{,}234", 1.0),
        ("#### 1e3", "13", 0.0),
        ("it falls to -3.5 degrees", "-3.50", 1.0),
        ("50% of them", "50", 1.0),
        ("#### 18 or 19", "18", 0.0),
        ("\\boxed{18, 19}", "18", 0.0),
        ("I do not know", "7", 0.0),
        ("", "7", 0.0),
    ],
)
def test_the_final_answer_is_compared(math_answers, response, label, reward):
    assert rewards_of(math_answers, [response], [label]) == [reward]


def test_responses_without_an_answer_are_counted(math_answers):
    answer = math_answers.reward_func(["p 3", "p ?"], ["p", "p"], ["3", "3"])
    assert answer == {"rewards": [1.0, 0.0], "extra_logs": {"answered": [1.0, 0.0]}}


@pytest.mark.parametrize("label, said", [(None, "set data.label_key"), ("####", "no answer that can be read")])
def test_mathematics_needs_a_readable_label(math_answers, label, said):
    with pytest.raises(ValueError, match=said):
        rewards_of(math_answers, ["3"], [label])


@pytest.mark.skipif(not GSM8K.is_file(), reason="no GSM8K here")
def test_reference_answers_of_gsm8k_score_1_and_other_numbers_0(math_answers):
    labels = [json.loads(line)["answer"] for line in GSM8K.read_text().splitlines()]
    assert rewards_of(math_answers, labels, labels) == [1.0] * len(labels)
    labels = labels[:150]
    finals = [label.rsplit("####", 1)[1].strip() for label in labels]
    numbers = [int(final.replace(",", "")) for final in finals]
    right = [lambda n, final: f"#### {final}", lambda n, final: f"It is \\boxed{{{n}}}.", lambda n, final: f"So ${n}."]
    for write in right:
        responses = [write(number, final) for number, final in zip(numbers, finals)]
        assert rewards_of(math_answers, responses, labels) == [1.0] * len(labels)
    for number_of in (lambda n: n + 1, lambda n: -n - 1, lambda n: n * 10 + 5, lambda n: n + 0.01):
        wrong = [f"#### {number_of(number)}" for number in numbers]
        assert rewards_of(math_answers, wrong, labels) == [0.0] * len(labels)


# --- code -------------------------------------------------------------------------------------------------------------

ADD = "def add(a, b):\n    return a + b\n"
TESTS = json.dumps(["assert add(1, 2) == 3", "assert add(-1, 1) == 0"])


@pytest.mark.parametrize(
    "response, label, reward",
    [
        (f"```python\n{ADD}```", TESTS, 1.0),
        (f"First\n```python\nadd = 1\n```\nbetter:\n```py\n{ADD}```\ndone", TESTS, 1.0),
        (f"cut off ```python\n{ADD}", TESTS, 1.0),
        (ADD, TESTS, 1.0),
        (ADD, "['assert add(1, 2) == 3', 'assert add(1, 2) == 4']", 0.5),
        (ADD, "assert add(1, 2) == 3\nfor i in range(3):\n    assert add(i, 0) == i", 1.0),
        (ADD, "assert add(1, 2) == 3\nassert add(1, 2) == 4", 0.0),
        ("def add(a, b): return a - b", TESTS, 0.0),
        ("def add(a, b): return 3", TESTS, 0.5),
        ("def add(a b)", TESTS, 0.0),
        ("I cannot write code.", TESTS, 0.0),
        ("", TESTS, 0.0),
        (f"import math, collections, subprocess\n{ADD}", TESTS, 1.0),
        (f"import numpy\n{ADD}", json.dumps(["assert numpy.add(1, 2) == 3"]), 1.0),
    ],
)
def test_the_share_of_passed_tests(code_tests, response, label, reward):
    assert rewards_of(code_tests, [response], [label]) == [reward]


@pytest.mark.parametrize(
    "code", ["while True: pass", "import time; time.sleep(600)", "import threading; threading.Event().wait()"]
)
def test_endless_code_is_killed(code_tests, monkeypatch, code):
    monkeypatch.setattr(code_tests, "WALL_S", 1.0)
    started = time.monotonic()
    assert rewards_of(code_tests, [code], [TESTS]) == [0.0]
    assert time.monotonic() - started < 60


def test_a_test_that_hangs_keeps_what_passed_before(code_tests, monkeypatch):
    monkeypatch.setattr(code_tests, "WALL_S", 1.5)
    assert rewards_of(code_tests, [ADD], [json.dumps(["assert add(1, 2) == 3", "while True: add(1, 1)"])]) == [0.5]


def test_cpu_time_is_bounded(code_tests, monkeypatch):
    monkeypatch.setattr(code_tests, "WALL_S", 100.0)
    started = time.monotonic()
    code = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert rewards_of(code_tests, [code], [TESTS]) == [0.0]
    assert time.monotonic() - started < code_tests.WALL_S / 2


def test_memory_is_bounded(code_tests):
    hog = "data = []\nwhile True: data.append(bytearray(1 << 26))"
    assert rewards_of(code_tests, [hog], [TESTS]) == [0.0]
    kept = "try:\n    x = bytearray(4 << 30)\nexcept MemoryError:\n    x = None\n" + ADD
    assert rewards_of(code_tests, [kept], [json.dumps(["assert x is None"])]) == [1.0]


def test_files_in_the_working_folder_are_fine_and_go_away(code_tests, tmp_path):
    code = """
import os, tempfile
with tempfile.TemporaryDirectory() as folder:
    open(folder + "/a", "w").write("text")
open("b", "w").write("text")
read = open("b").read()
left = os.path.exists(folder)
here = os.getcwd()
try:
    open("big", "wb").write(bytes(1 << 22))
    big = True
except OSError:
    big = False
"""
    tests = ["assert read == 'text'", "assert left is False", "assert not big"]
    before = set(Path("/tmp").iterdir())
    assert rewards_of(code_tests, [code], [json.dumps(tests)]) == [1.0]
    assert not [path for path in set(Path("/tmp").iterdir()) - before if (path / "b").exists()]


def test_printing_a_lot_costs_nothing(code_tests):
    code = f"import sys\nfor _ in range(200):\n    print('x' * 1_000_000)\n    print('y' * 1_000_000, file=sys.stderr)\n{ADD}"
    assert rewards_of(code_tests, [code], [TESTS]) == [1.0]


def test_secrets_of_the_environment_stay_outside(code_tests, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert rewards_of(code_tests, ["import os"], ["assert 'WANDB_API_KEY' not in os.environ"]) == [1.0]


@pytest.mark.parametrize("label", [None, ""])
def test_code_needs_tests(code_tests, label):
    with pytest.raises(ValueError, match=r"set data\.label_key"):
        rewards_of(code_tests, [ADD], [label])


# --- sentiment --------------------------------------------------------------------------------------------------------


def test_valence_of_a_small_lexicon(sentiment, tmp_path, monkeypatch):
    path = tmp_path / "lexicon.txt"
    path.write_text("good\t1.5\t0.1\nbad\t-2\n7\t100\n")
    monkeypatch.setenv("SENTIMENT_LEXICON", str(path))
    assert rewards_of(sentiment, ["Good, GOOD day", "a bad one", "neither", ""], [None] * 4) == [3.0, -2.0, 0.0, 0.0]


def test_a_missing_lexicon_says_what_to_set(sentiment, monkeypatch):
    monkeypatch.setenv("SENTIMENT_LEXICON", "/nowhere/lexicon.txt")
    with pytest.raises(FileNotFoundError, match=r"no lexicon /nowhere/lexicon\.txt: set SENTIMENT_LEXICON"):
        rewards_of(sentiment, ["good"], [None])


@pytest.mark.skipif(not VADER.is_file(), reason="no VADER lexicon here")
def test_valence_of_vader(sentiment, monkeypatch):
    monkeypatch.setenv("SENTIMENT_LEXICON", str(VADER))
    happy, sad, plain = rewards_of(
        sentiment, ["a wonderful, happy day", "a terrible, sad day", "the table"], [None] * 3
    )
    assert happy > 3 and sad < -3 and plain == 0.0


# --- in worker processes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, response, label, reward",
    [("math_answers", "#### 42", "42", 1.0), ("code_tests", ADD, TESTS, 1.0), ("sentiment", "good", None, 1.5)],
)
def test_each_runs_as_a_reward_source(tmp_path, monkeypatch, name, response, label, reward):
    (tmp_path / "lexicon.txt").write_text("good\t1.5\n")
    monkeypatch.setenv("SENTIMENT_LEXICON", str(tmp_path / "lexicon.txt"))
    scorer = FunctionScorer(FunctionRewardConfig(path=str(REWARDS / f"{name}.py"), weight=1.0, processes=1))
    try:
        assert scorer.score([ScoringSample.of_texts(None, PROMPT, response, label)]).result(60).rewards.tolist() == [
            reward
        ]
    finally:
        scorer.close()
