"""Batch jobs read their settings and Slurm's answers. tests/unit/test_slurm_scripts.py runs whole scripts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch.run_certificates import Authority
from nemo_style_rlhf.launch.slurm_job import Component, first_address, words_of
from tests.support.paths import ROOT


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a=1 \\\n  b=2", ["a=1", "b=2"]),
        ("a=1 \\\nb=2\n", ["a=1", "b=2"]),
        ('a="1 2" b=[3,{c:4}]', ["a=1 2", "b=[3,{c:4}]"]),
        ('a="\'1\'" b=\\"2\\"', ["a='1'", 'b="2"']),
        ("a=$HOME/*", ["a=$HOME/*"]),
    ],
)
def test_overrides_are_split_as_a_shell_does(text: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRITIC_ARGS", text)
    assert words_of("CRITIC_ARGS") == words


def test_what_scontrol_says_of_a_failure_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_command(tmp_path, "scontrol", "echo no contact >&2; exit 1", monkeypatch)
    with pytest.raises(UserError, match=r"^scontrol show hostnames n\[0-1\] failed: no contact$"):
        first_address("n[0-1]")
    put_command(tmp_path, "scontrol", "echo n0", monkeypatch)
    with pytest.raises(UserError, match=r"^scontrol show node n0 names no NodeAddr"):
        first_address("n[0-1]")


def test_a_setup_may_print_what_is_no_utf_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_command(tmp_path, "srun", "printf '\\351\\n10.0.0.1 20000 20001\\n'", monkeypatch)
    for name in ("PYTHON", "SETUP", "SRUN"):
        monkeypatch.setenv(f"CRITIC_{name}", "python")
    assert Component(0, "critic", "CRITIC", 1).where("n0") == [("10.0.0.1", "20000", "20001")]


def test_an_authority_that_could_not_be_made_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_command(tmp_path, "openssl", "echo no entropy >&2; exit 1", monkeypatch)
    with pytest.raises(UserError, match="no entropy"):
        Authority(tmp_path / "tls")
    assert not (tmp_path / "tls").exists()


@pytest.mark.slow("starts an interpreter")
def test_an_old_python_is_a_users_mistake() -> None:
    start = "runpy.run_module('nemo_style_rlhf.launch.slurm_job', run_name='__main__')"
    code = f"import runpy, sys; sys.version_info = (3, 8); {start}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: BATCH_PYTHON is Python 3.")


def put_command(folder: Path, command: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / command).write_text(f"#!/bin/sh\n{text}\n")
    (folder / command).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
