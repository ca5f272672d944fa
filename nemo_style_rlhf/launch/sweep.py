"""A sweep (``-m``, Hydra's --multirun): one run after the other, each a process with an output folder of its own."""

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch import interrupt
from nemo_style_rlhf.launch.local import Child
from nemo_style_rlhf.launch.overrides import override
from nemo_style_rlhf.launch.program import Program

FOLDER = "run.output_dir"
LONGEST_NAME = 100
"""Characters of a folder's name."""
WORDS = ("-m", "--multirun")


def run_all(options: Sequence[str], runs: Sequence[Sequence[str]], given: Sequence[str]) -> int:
    """Start this program once for each of ``runs``, its overrides; ``options`` are the other words of the command line.

    The first run that fails ends the sweep. The same command continues it: runs that are done say so.

    Args:
        given: the output folder that each run would have by itself.

    Returns:
        The exit code of the last run that was started.

    Raises:
        UserError: several ranks were started, each of which would sweep.
    """
    if "RANK" in os.environ:
        raise UserError(
            "-m starts one process per run and cannot run under torchrun: start a sweep of ranks in a loop of your own"
        )
    interrupt.hand_over()
    folders = own_folders(runs, given)
    for number, (words, swept, folder) in enumerate(zip(runs, _swept(runs), folders, strict=True), start=1):
        print(f"run {number} of {len(runs)}: {' '.join(swept)}, in {folder}", file=sys.stderr, flush=True)
        others = [word for word in words if not word.lstrip("+").startswith(f"{FOLDER}=")]
        argv = [sys.executable, sys.argv[0], *options, *others, override(FOLDER, folder)]
        if code := _finish(Child(Program(f"run {number}", argv, folder=Path.cwd()), Path(os.devnull), shown=True)):
            print(
                f"run {number} of {len(runs)} ended with exit code {code}, later ones were not started", file=sys.stderr
            )
            return code
    print(f"done: {len(runs)} runs, in {', '.join(folders)}", file=sys.stderr)
    return 0


def own_folders(runs: Sequence[Sequence[str]], given: Sequence[str]) -> list[str]:
    """The output folder of each run: as given if they differ, else one below it that is named after what the run varies."""
    if len(set(given)) == len(runs):
        return list(given)
    names = [re.sub(r"[^\w.+-]+", "_", ",".join(words))[:LONGEST_NAME] for words in _swept(runs)]
    unique = names if len(set(names)) == len(runs) else [str(number) for number in range(1, len(runs) + 1)]
    return [f"{folder}/{name}" for folder, name in zip(given, unique, strict=True)]


def _swept(runs: Sequence[Sequence[str]]) -> list[list[str]]:
    """The overrides of each run that not all runs have."""
    return [[word for word in words if any(word not in other for other in runs)] for words in runs]


def _finish(child: Child) -> int:
    """Wait for the exit code. The first Ctrl-C is passed to the run, so it says where it stands; the second ends it."""
    try:
        while True:
            with suppress(TimeoutExpired):
                return child.wait(3600)
    except KeyboardInterrupt:
        child.interrupt()
        with suppress(KeyboardInterrupt):
            return child.wait(3600)
        return child.kill()
