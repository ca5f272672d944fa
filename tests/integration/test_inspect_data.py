"""trainers/inspect_data.py as a user runs it: in a pipe, on a terminal with and without colours."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.models import save_policy
from tests.support.paths import ROOT

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    save_policy(folder / "model")
    rows = [{"prompt": f"w{i}", "response": " w3 w4", "chosen": " w5 w6", "rejected": " w7"} for i in range(6)]
    rows[1] |= {"response": " ", "chosen": " w7"}
    rows[3] |= {"prompt": "w1 " * 40}
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def inspect(inputs: Path, *given: str, code: int = 0, **environment: str) -> str:
    command = [
        "trainers/inspect_data.py", f"model.path={inputs / 'model'}",
        f"data.train_path={inputs / 'rows.jsonl'}", "data.max_length=20", "num_samples=2", *given,
    ]  # fmt: skip
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    environment = {**plain, "COLUMNS": "200", **environment}
    if "PYTHONIOENCODING" in environment:  # Python reads it when it starts
        command = [sys.executable, *command]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=environment)
    else:
        done = warm.run(command, timeout=120, environment=environment)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if code == 0 else done.stderr


def test_learned_tokens_stand_in_brackets_in_a_pipe(inputs: Path):
    output = inspect(inputs)
    assert "\x1b" not in output
    assert "Sample 1 of 4\ntext: 4 tokens, 3 learned\n·w0│⟦·w3│·w4│⟨<eos>⟩⟧\n" in output
    assert "Sample 2 of 4\n" in output and "Sample 3 of 4" not in output
    assert "75% of the tokens are learned" in output


def test_what_was_dropped_is_shown_with_its_first_rows(inputs: Path):
    output = inspect(inputs)
    assert "rows.jsonl: 4 rows kept, 2 dropped" in output
    assert re.search(r"1 longer than 20 tokens, first of them:\n.*rows\.jsonl line 4: \{\"prompt\": \"w1 w1 ", output)
    assert re.search(r"1 with an empty response, first of them:\n.*rows\.jsonl line 2: ", output)


SIDES = {
    "reward_model": (
        "chosen: 4 tokens, 1 scored\n·w0│·w5│⟦·w6⟧│⟨<eos>⟩",
        "rejected: 3 tokens, 1 scored\n·w0│⟦·w7⟧│⟨<eos>⟩",
    ),
    "dpo": ("chosen: 4 tokens, 3 learned\n·w0│⟦·w5│·w6│⟨<eos>⟩⟧", "rejected: 3 tokens, 2 learned\n·w0│⟦·w7│⟨<eos>⟩⟧"),
    "kto": (
        "desirable: 4 tokens, 3 learned\n·w0│⟦·w5│·w6│⟨<eos>⟩⟧",
        "undesirable: 3 tokens, 2 learned\n·w0│⟦·w7│⟨<eos>⟩⟧",
    ),
}


@pytest.mark.parametrize("stage", SIDES)
def test_both_sides_of_a_pair_are_shown(inputs: Path, stage: str):
    output = inspect(inputs, f"stage={stage}")
    assert all(side in output for side in SIDES[stage])
    assert "1 with equal responses" in output


def test_colours_come_on_a_terminal_unless_refused_and_say_nothing_that_brackets_do_not(inputs: Path):
    plain = inspect(inputs)
    coloured = inspect(inputs, FORCE_COLOR="1", TERM="xterm-256color")
    assert "\x1b[1;32m·w3\x1b[0m" in coloured
    assert "\x1b[1;32m·w0" not in coloured
    assert COLOUR.sub("", coloured) == plain
    refused = inspect(inputs, FORCE_COLOR="1", NO_COLOR="1", TERM="xterm-256color")
    assert "32m" not in refused
    assert COLOUR.sub("", refused) == plain


def test_a_terminal_without_unicode_still_shows_everything(inputs: Path):
    assert "\\xb7w0\\u2502\\u27e6\\xb7w3" in inspect(inputs, PYTHONIOENCODING="ascii")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "stage=ppo",
            r"stage=ppo is not possible: a prompt has no learned tokens to show; trainers/train_ppo_actor\.py",
        ),
        ("data.response_key=answer", r"has no key 'answer'.*set data\.response_key"),
        ("model.path=/nowhere", r"model\.path=/nowhere: there is no such folder"),
        ("data.train_path=none.jsonl", r"data\.train_path=none\.jsonl: it does not exist"),
        ("data.max_length=2", r"all 6 rows were dropped"),
        (
            "data.chosen_key=better",
            r"data\.chosen_key is set but stage=sft does not read it: set stage to reward_model",
        ),
    ],
)
def test_a_mistake_is_one_sentence(inputs: Path, override: str, sentence: str):
    (line,) = inspect(inputs, override, code=2).splitlines()
    assert re.search(sentence, line), line
