"""An entry point that refuses what it is given."""

import runpy
import signal
import sys

import pytest

from tests.support.paths import ROOT


def refusal(script: str, arguments: list[str], capsys, monkeypatch) -> str:
    """Run an entry point in this process; its only line of error output."""
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    capsys.readouterr()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        with pytest.raises(SystemExit) as exit_info:
            runpy.run_path(str(ROOT / script), run_name="__main__")
    finally:
        signal.pthread_sigmask(
            signal.SIG_SETMASK, mask
        )  # an actor blocks SIGUSR1, and later tests' children would inherit that
    assert exit_info.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0].removeprefix("error: ")
