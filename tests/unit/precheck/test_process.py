"""Checks run without torch, and only their sentences come back."""

import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.slow("each starts a process")

CHECK = """
import os, sys
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.precheck.process import without_torch

def check(said):
    assert os.getpid() != {pid}
    try:
        import torch
    except ImportError:
        print("noise")
        {then}

pid = os.getpid()
try:
    without_torch(check, "this")
except UserError as error:
    print(f"refused: {{error}}")
assert "torch" not in sys.modules and "transformers" not in sys.modules
import torch
"""


@pytest.mark.parametrize(
    ("then", "printed"),
    [
        ("raise UserError(said)", "refused: this\n"),
        ("import transformers; raise UserError(str(transformers.is_torch_available()))", "refused: False\n"),
        ("return", ""),
        ("raise KeyError(said)", ""),
        ("os._exit(9)", ""),
    ],
)
def test_without_torch(then: str, printed: str) -> None:
    code = CHECK.format(pid="pid", then=then)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


@pytest.mark.parametrize("environment", [{"RANK": "1"}, {"NSR_CHECKED": "yes"}])
def test_one_process_of_a_run_checks(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_style_rlhf.precheck.process import is_due

    for name in ("RANK", "NSR_CHECKED"):
        monkeypatch.delenv(name, raising=False)
    assert is_due()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert not is_due()
