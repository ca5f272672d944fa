"""Runs of the supervised trainers."""

import os
import subprocess
from pathlib import Path

from tests.support import operators, warm


def train(
    script: str, *overrides: str, ranks: int = 1, operators_in: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a stage; what it computes with is recorded in ``operators_in``, see :func:`operators.refused`."""
    recorded = {} if operators_in is None else {operators.VARIABLE: str(operators_in)}
    command = [f"trainers/{script}.py", "run.num_threads=1", *overrides]
    return warm.run(command, timeout=300, ranks=ranks, environment={**os.environ, **recorded})
