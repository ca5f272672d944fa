"""What tests of several folders, and several workers, share."""

import functools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

# Before torch is imported: the workers share the cores, and threads that wait for one another would spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from nemo_style_rlhf.scoring import sandbox
from nemo_style_rlhf.wire import secret
from tests.cluster.slurm import why_no_cluster
from tests.support.folders import made_once
from tests.support.paths import ROOT

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it starts with &, tests and all
settings.register_profile("busy", deadline=None)  # a machine that does other things, too, is no fault of a test's
settings.load_profile("busy")
HERE = Path(__file__).parent
SECONDS = HERE / "seconds.json"
"""Seconds of each file's tests that take the longest, by selection (``-m``); ``--write-seconds`` writes them."""
WORTH_SORTING_S = 3.0


def why_not_root() -> str | None:
    user = os.geteuid()
    return None if user == 0 else f"only root can look as another user does, this is user {user}: run the tests as root"


PARTS = {
    HERE / "integration" / "test_other_users.py": ("NSR_DEMAND_ROOT", why_not_root),
    HERE / "cluster" / "test_ppo_hetjob.py": ("NSR_DEMAND_CLUSTER", why_no_cluster),
    HERE / "cluster" / "test_supervised_job.py": ("NSR_DEMAND_CLUSTER", why_no_cluster),
    HERE / "unit" / "scoring" / "sandbox": ("NSR_DEMAND_SANDBOX", functools.cache(sandbox.why_no_sandbox)),
}
"""Folders and files whose tests need a machine of their own kind, each with a variable that is set where they have to run, so
that what they lack is an error, and with a function that tells why they cannot."""


def why_left_out(part: Path) -> str | None:
    demanded, why = PARTS[part]
    return None if demanded in os.environ else why()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path in PARTS and why_left_out(collection_path):
        return True
    few = config.option.markexpr == "more" and collection_path.suffix == ".py"  # which most files have none of
    return True if few and "mark.more" not in collection_path.read_text() else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-seconds", action="store_true", help=f"write the files' seconds into {SECONDS.name}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The dearest file first, so that no worker ends long after the other."""
    seconds = json.loads(SECONDS.read_text()).get(config.option.markexpr, {})
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0))


def write_seconds(terminalreporter: pytest.TerminalReporter) -> None:
    spent: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                spent[report.nodeid.partition("::")[0]] += round(report.duration)
    dear = {name: seconds for name, seconds in spent.most_common() if seconds >= WORTH_SORTING_S}
    known = json.loads(SECONDS.read_text()) | {terminalreporter.config.option.markexpr: dear}
    SECONDS.write_text(json.dumps(known, indent=1) + "\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.config.option.write_seconds:
        write_seconds(terminalreporter)
    given = [Path(path).resolve() for path in terminalreporter.config.args]
    for part in PARTS:
        if any(part.is_relative_to(path) for path in given) and (reason := why_left_out(part)):
            terminalreporter.write_line(f"{part.relative_to(ROOT)} did not run, {reason}")


@pytest.fixture(scope="session", autouse=True)
def _judge_code_anyway() -> Iterator[None]:
    """The tests of honest code need no sandbox; where there is one, it is used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(sandbox.WITHOUT, "1")
        yield


@pytest.fixture(autouse=True)
def _forget_tokens() -> Iterator[None]:
    """A test's token, which the client took out of the environment, is not that of the next test."""
    yield
    secret._from_environment.clear()


@pytest.fixture(autouse=True)
def _leave_the_process_as_it_was() -> Iterator[None]:
    """A test that ends the process group, or leaves a signal blocked, fails itself and not a later one of its worker."""

    def state() -> tuple[object, set[signal.Signals]]:
        distributed = sys.modules.get("torch.distributed")
        return distributed and distributed.group.WORLD, signal.pthread_sigmask(signal.SIG_BLOCK, ())

    group, blocked = state()
    yield
    group_now, blocked_now = state()
    assert blocked_now == blocked
    assert group in (None, group_now), "the process group of this worker's tests is gone"


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outputs of one run, with a seed that is not the documented one."""

    def make(folder: Path) -> None:
        command = [
            ROOT / ".venv-actor/bin/python", "examples/quickstart/run.py", "--seed", "3", "--output-dir", folder
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        (folder / "terminal.txt").write_text(done.stdout + done.stderr)
        # Now, as later other tests' processes may use the models.
        processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        (folder / "left_behind.txt").write_text(
            "".join(line for line in processes.splitlines(True) if str(folder) in line)
        )

    return made_once(tmp_path_factory, "quickstart", make)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``undisturbed(name, *actor_overrides, ranks=1)``: the folder of a whole run of :mod:`tests.support.ppo_runs`, with which
    tests compare theirs. Each name is one run, whichever files ask for it."""
    from tests.support import ppo_runs  # not at the top: most unit tests need neither torch nor transformers
    from tests.support.processes import run_pair

    def run(name: str, *actor_overrides: str, ranks: int = 1) -> Path:
        inputs = made_once(tmp_path_factory, "ppo_inputs", ppo_runs.save_inputs)
        given = [*ppo_runs.actor_overrides(inputs), *actor_overrides]

        def make(folder: Path) -> None:
            run_pair(folder, ppo_runs.server_overrides(inputs), given, ranks=ranks)

        return made_once(tmp_path_factory, f"undisturbed_{name}", make)

    return run
