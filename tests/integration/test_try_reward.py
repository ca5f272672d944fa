"""`trainers/try_reward.py` and the handbook's reward functions, as they stand, in the processes in which a run calls them."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

from tests.support.models import save_tokenizer
from tests.support.paths import ACTOR_PYTHON, ROOT
from tests.support.seeds import example

Row = Mapping[str, object]


def tried(
    folder: Path, source: str, rows: Sequence[Row], *overrides: str, environment: Mapping[str, str] | None = None
) -> tuple[int, list[list[str]], list[str]]:
    """The exit code, the table's cells with its heading, and the errors."""
    (folder / "reward.py").write_text(source)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        ACTOR_PYTHON,
        ROOT / "trainers" / "try_reward.py",
        "reward.function.path=reward.py",
        "data.path=rows.jsonl",
    ]
    path = f"{ACTOR_PYTHON.parent}{os.pathsep}{os.environ['PATH']}"  # the handbook's functions start `python`
    done = subprocess.run(
        [*command, *overrides], cwd=folder, capture_output=True, text=True, timeout=180,
        env={**os.environ, "PATH": path, "NO_COLOR": "1", **(environment or {})},
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.strip() and "─" not in line]
    return done.returncode, [line.split() for line in lines], done.stderr.splitlines()


def column(table: list[list[str]], name: str) -> list[float]:
    """Numbers stand at the end of a line, texts without blanks before them."""
    place = table[0].index(name) - len(table[0])
    return [float(line[place]) for line in table[1:]]


def test_code_is_rewarded_by_its_tests(tmp_path: Path) -> None:
    """The handbook's example 1: one number for all among its extra logs."""
    responses = ["def test_it():\n    assert 1 + 1 == 2", "def test_it():\n    assert False", "x = 1"]
    rows = [{"prompt": f"# task {i}\n", "response": response, "label": "-"} for i, response in enumerate(responses)]
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    code, table, errors = tried(tmp_path, example("### Example 1: Code"), rows, environment=alone)
    assert (code, errors) == (0, [])
    assert column(table, "reward") == column(table, "code_correctness") == [1.0, 0.3, 0.0]
    assert column(table, "score") == [1.0, 0.65, 0.5]
    assert column(table, "avg_correctness") == [0.4333] * 3


def test_mathematics_is_rewarded_by_its_answer(tmp_path: Path) -> None:
    """Example 2, whose extra logs are all numbers for the whole group."""
    responses = ["the answer is: 42", "#### 41", "#### 42", "no idea"]
    rows = [{"prompt": "6*7? ", "response": response, "label": 42} for response in responses]
    code, table, errors = tried(tmp_path, example("### Example 2: Math"), rows)
    assert (code, errors) == (0, [])
    assert column(table, "reward") == [1.0, 0.0, 1.0, -0.5]
    assert column(table, "score") == [1.0, 0.3333, 1.0, 0.0]
    assert column(table, "math_accuracy") == [0.5] * 4 and column(table, "answer_formatted") == [0.75] * 4


def save_in_hub_cache(home: Path, name: str) -> None:
    """A tiny DeBERTa classifier of two labels, as `huggingface_hub` would have left it after a download."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    config = DebertaV2Config(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, pad_token_id=0
    )
    DebertaV2ForSequenceClassification(config).save_pretrained(folder / "snapshots" / commit)
    save_tokenizer(folder / "snapshots" / commit)


def test_conversations_are_rewarded_by_a_model_of_the_hub(tmp_path: Path) -> None:
    """Example 3, which loads a model by its hub name when its file is imported."""
    save_in_hub_cache(tmp_path / "home", "OpenAssistant/reward-model-deberta-v3-large")
    rows = [{"prompt": "w1", "response": response} for response in (" ".join(f"w{i}" for i in range(2, 14)), "w2 w3")]
    offline = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    slow_import = "reward.function.timeout_s=120"
    code, table, errors = tried(
        tmp_path, example("### Example 3: Conversation"), rows, slow_import, environment=offline
    )
    assert code == 0, errors
    long, short = column(table, "reward")
    assert 0 < 2 * short < 1 and 0 < long < 1  # less than ten words are worth half
    assert (
        column(table, "min_quality") == [min(long, short)] * 2
        and column(table, "max_quality") == [max(long, short)] * 2
    )


def test_scores_for_filtering_come_beside_rewards(tmp_path: Path) -> None:
    """The filtering example, whose reward logic is left to the reader."""
    given = "import torch\n\n\ndef calculate_rewards(_):\n    return torch.tensor([2.0, -1.0, 0.5])\n\n\n"
    rows = [{"prompt": "p", "response": "r"}] * 3
    code, table, errors = tried(tmp_path, given + example("### Dynamic Filtering"), rows)
    assert (code, errors) == (0, [])
    assert column(table, "reward") == [2.0, -1.0, 0.5] and column(table, "score") == [1.0, 0.0, 1.0]
    assert column(table, "filtered_ratio") == [0.6667] * 3


BY_NAME = """
async def reward_func(completions, difficulty, label, weight=2.0, **others):
    assert sorted(others) == ["labels", "prompts", "queries", "source", "turns"], others
    assert others["source"] == [None, "book"] and others["labels"] == ["3", None]
    assert label == [3, None]
    return [weight * len(text) * hard for text, hard in zip(completions, difficulty)]
"""


def test_a_function_gets_the_fields_that_it_asks_for(tmp_path: Path) -> None:
    rows: list[Row] = [
        {"prompt": "p", "response": "four", "difficulty": 1.5, "label": 3},
        {"prompt": "p", "response": "to", "difficulty": 1, "source": "book"},
    ]
    code, table, errors = tried(tmp_path, BY_NAME, rows)
    assert (code, errors) == (0, [])
    assert column(table, "reward") == [12.0, 4.0]


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        (
            "def reward_func(prompts, difficulty): ...",
            2,
            "asks for difficulty, which no row has: it may ask for queries, ",
        ),
        ("def reward_func(prompts): return [0.5, float('nan')]", 1, "answered with nan as number 2 of rewards, "),
        (
            "def reward_func(prompts): return 1 / 0",
            1,
            "raised ZeroDivisionError: division by zero (line 1): correct it",
        ),
        ("def other(): ...", 2, "it has no function reward_func, set reward.function.name to the one it has"),
    ],
)
def test_what_is_wrong_is_said_once(tmp_path: Path, source: str, code: int, said: str) -> None:
    rows = [{"prompt": "p", "response": response} for response in "ab"]
    exit_code, table, errors = tried(tmp_path, source, rows)
    assert exit_code == code and len(errors) == 1 and errors[0].startswith("error: ") and said in errors[0], errors
    assert [line[-1] for line in table[1:]] == (["-", "-"] if code == 1 else [])


@pytest.mark.parametrize(
    ("rows", "overrides", "said"),
    [
        (
            [{"prompt": "p"}],
            [],
            "rows.jsonl line 1 has no key 'response' (the keys there are: prompt): set data.response_key",
        ),
        ([{"prompt": ["p"], "response": "r"}], [], "rows.jsonl line 1: 'prompt' holds list, expected a string"),
        ([{"prompt": "p", "response": None}], [], "rows.jsonl line 1: 'response' holds NoneType, expected a string"),
        ([], [], "rows.jsonl is empty: expected at least one row with a prompt and a response"),
        (
            [{}],
            ["reward=remote_critic_rm"],
            "reward.critic.weight=1 asks a reward model, but without a model only functions, ",
        ),
        ([{}], ["data.path=none.jsonl"], "data.path=none.jsonl: it does not exist"),
    ],
)
def test_rows_and_sources_that_cannot_be_tried_are_refused(
    tmp_path: Path, rows: list[Row], overrides: list[str], said: str
) -> None:
    code, _, errors = tried(tmp_path, "def reward_func(queries): ...", rows, *overrides)
    assert code == 2 and len(errors) == 1 and said in errors[0], errors
