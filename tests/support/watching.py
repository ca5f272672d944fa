"""trainers/watch.py as a process."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.paths import ROOT


@contextmanager
def watching(*folders: Path, options: tuple[str, ...] = ()) -> Iterator[str]:
    """The link that it prints, while it runs."""
    with watcher(*folders, options=options) as (link, _):
        yield link


@contextmanager
def watcher(*folders: Path, options: tuple[str, ...] = ()) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """As :func:`watching`, and the process, whose output is its ``stdout``."""
    command = [sys.executable, ROOT / "trainers" / "watch.py", *folders, "--port=0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("open http"), line
            yield line.split()[1], process
        finally:
            process.kill()
