"""Runs of the supervised trainers."""

import subprocess

from tests.support import warm


def train(script: str, *overrides: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    return warm.run([f"trainers/{script}.py", "run.num_threads=1", *overrides], timeout=300, ranks=ranks)
