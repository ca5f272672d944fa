"""Puts faults into a copy of the repository, one by one, and tells which of them the tests find.

    python -m tests.mutants.run [--only NAME] [--no-control] [--all]

The copy is complete, so that every process of a test runs the faulty code: PYTHONPATH begins with it, before the package that the
environments have installed. Exits with 1 if a fault was not found.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nemo_style_rlhf.processes.child import ChildProcess
from tests.mutants.fault import Fault, Inapplicable, guarantees
from tests.mutants.faults import TWENTY
from tests.mutants.others import OTHERS
from tests.support.paths import ACTOR_PYTHON, ROOT

LONGEST_S = 1800.0
"""Seconds after which tests are ended; a fault that lets them hang is found."""
ENVIRONMENTS = (".venv-actor", ".venv-server")
NO_FAILURE, FAILURE = 0, 1
"""pytest's exit codes."""


@dataclass(frozen=True)
class Outcome:
    failed: str | None
    """The test that failed first; None if all passed."""
    seconds: float


class Broken(Exception):
    """pytest did not run the tests."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--only", metavar="NAME", help="one fault")
    parser.add_argument("--no-control", action="store_true", help="do not run the tests without a fault first")
    parser.add_argument(
        "--all", action="store_true", help="run all that pytest selects by itself for each fault: hours"
    )
    options = parser.parse_args()
    faults = [fault for fault in (*TWENTY, *OTHERS) if options.only in (None, fault.name)]
    if not faults:
        parser.error(f"there is no fault {options.only}: tests/mutants lists them")
    rows, controlled, found = guarantees(), set[tuple[str, ...]](), 0
    with copied() as copy:
        for fault in faults:
            fault.row(rows)
            tests = () if options.all else fault.tests
            if not options.no_control and tests not in controlled:
                controlled.add(tests)
                if (sound := run(copy, tests)).failed is not None:
                    print(f"without a fault {sound.failed} fails, by which {fault.name} is found")
                    return 1
            with put_in(fault, copy):
                outcome = run(copy, tests)
            found += outcome.failed is not None
            word = "NOT FOUND" if outcome.failed is None else "found"
            print(f"{word:9} {outcome.seconds:7.1f} s  {fault.name:45} {outcome.failed or ''}", flush=True)
    print(f"{found} of {len(faults)} found")
    return 0 if found == len(faults) else 1


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the files of the repository that git knows or would know."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout.decode()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) / ROOT.name
        for name in filter(None, listed.split("\0")):
            if os.path.lexists(ROOT / name):  # git lists deleted files, too
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
        for name in ENVIRONMENTS:
            if not (copy / name).is_symlink():
                (copy / name).symlink_to((ROOT / name).resolve())
        yield copy


@contextmanager
def put_in(fault: Fault, copy: Path) -> Iterator[None]:
    path = copy / fault.file
    faulty, sound, made = fault.applied(copy), path.read_bytes(), path.stat()
    path.write_text(faulty)
    try:
        yield
    finally:
        path.write_bytes(sound)
        os.utime(path, ns=(made.st_atime_ns, made.st_mtime_ns))  # by which Python tells that its bytecode is another's


def run(copy: Path, tests: Sequence[str]) -> Outcome:
    """Run tests in the copy, up to the first that fails.

    Raises:
        Broken: pytest ran no test, or was interrupted.
    """
    alone = ["-n", "0"] if tests else []
    command = [
        copy / ACTOR_PYTHON.relative_to(ROOT),
        "-m",
        "pytest",
        "-x",
        "-rfE",
        *alone,
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    paths = [str(copy), *filter(None, [os.environ.get("PYTHONPATH")])]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as said:  # not a pipe, which processes that outlive pytest would keep open
        process = ChildProcess(
            command,
            cwd=copy,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            return Outcome(f"no end within {LONGEST_S:g} s", LONGEST_S)
        finally:
            seconds = time.monotonic() - began
            process.kill()
        said.seek(0)
        output = said.read()
    if code == NO_FAILURE:
        return Outcome(None, seconds)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?::.+?)(?: - |$)", output, re.MULTILINE)
    if code != FAILURE or failed is None:
        raise Broken(f"pytest ended with exit code {code}:\n{output}")
    return Outcome(failed[1], seconds)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Inapplicable, Broken) as error:
        sys.exit(f"error: {error}")
