"""No response gets a reward for an attack on the judge, and none sees a secret or the machine."""

import json
import os
import subprocess
import sys
import time

import pytest

from tests.support.example_rewards import load, rewards_of
from tests.support.paths import ROOT
from tests.unit.scoring.sandbox.attacks import ATTACKS

pytestmark = pytest.mark.slow("each waits for an attack's end")

TESTS = [
    "assert add(1, 2) == 3",
    "assert abs(add(-1, 1.5) - 0.5) < 1e-6",
    "assert all(map(lambda i: add(i, 1) == i + 1, (4, 5)))",
    "total = add(1, 1.5)\nassert 2.4 < total < 2.6",
    "import math\nassert math.isclose(add(0.25, 0.25), 0.5)",
    "assert [add(1, 1), add(2, 2)] == [2, 4] and str(add(3, 3)) == '6'",
]


@pytest.fixture(scope="module")
def code_tests():
    return load("code_tests")


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_gets_nothing(code_tests, monkeypatch, name):
    monkeypatch.setattr(code_tests, "WALL_S", 4.0)
    started = time.monotonic()
    assert rewards_of(code_tests, [ATTACKS[name]], [json.dumps(TESTS)]) == [0.0]
    assert time.monotonic() - started < 30.0


LEAK = """
import glob, os
found = []
for path in [*glob.glob('/proc/*/environ'), *glob.glob('/proc/*/task/*/environ'), TOKEN_FILE]:
    try:
        if b'a-shared-' + b'secret' in open(path, 'rb').read(): found.append(path)
    except OSError: pass
"""


def test_no_secret_of_a_parent_can_be_read(tmp_path):
    """Neither from the environments of the processes that started the code nor from the token's file."""
    token_file = tmp_path / "token"
    token_file.write_text("a-shared-secret")
    response = f"TOKEN_FILE = {str(token_file)!r}\n{LEAK}"
    program = (
        "import sys\nfrom tests.support.example_rewards import load, rewards_of\n"
        f"print(rewards_of(load('code_tests'), [{response!r}], [\"['assert found == []']\"]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "NSR_CRITIC_TOKEN": "a-shared-secret", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[1.0]"
