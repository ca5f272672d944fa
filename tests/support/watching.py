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
    command = [sys.executable, ROOT / "trainers" / "watch.py", *folders, "--port=0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("open http"), line
            yield line.split()[1]
        finally:
            process.kill()
