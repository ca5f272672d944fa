"""What tests of several folders, and several workers, share."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings

from nemo_style_rlhf.critic_service import secret
from tests.cluster.slurm import why_no_cluster
from tests.integration.processes import ROOT

settings.register_profile("busy", deadline=None)  # a machine that does other things, too, is no fault of a test's
settings.load_profile("busy")
CLUSTER_TESTS = Path(__file__).parent / "cluster"
DEMAND_CLUSTER = "NSR_DEMAND_CLUSTER"
"""Set where tests/cluster has to run: what it lacks is then an error."""


def without_cluster() -> str | None:
    """Why the tests of the batch scripts are left out, where they are; not asked of a folder that is given by name."""
    return None if DEMAND_CLUSTER in os.environ else why_no_cluster()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if collection_path == CLUSTER_TESTS and without_cluster() else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reason = without_cluster()
    if reason and any(CLUSTER_TESTS.is_relative_to(Path(given).resolve()) for given in terminalreporter.config.args):
        terminalreporter.write_line(f"tests/cluster did not run, {reason}")


@pytest.fixture(autouse=True)
def _forget_tokens() -> Iterator[None]:
    """A test's token, which the client took out of the environment, is not that of the next test."""
    yield
    secret._from_environment.clear()


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outputs of one run, with a seed that is not the documented one; the first worker that wants them makes them."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "quickstart"
    with FileLock(folder.with_suffix(".lock")):
        left_behind = folder / "left_behind.txt"
        if not left_behind.exists():
            command = [
                ROOT / ".venv-actor/bin/python", "examples/quickstart/run.py", "--seed", "3", "--output-dir", folder,
            ]  # fmt: skip
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            # Now, as later other tests' processes may use the models.
            processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
            left_behind.write_text("".join(line for line in processes.splitlines(True) if str(folder) in line))
    return folder
