"""Checks that a program runs in its own environment. Standard library only: another Python may lack everything else."""

import importlib.util
import sys
from itertools import dropwhile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "nsr-"
"""The names of installed commands (setup.py) begin so: nsr-train-sft is trainers/train_sft.py."""
NEEDS = {
    "trainers": ("actor", ("hydra", "torch", "requests", "pytorch_lightning")),
    "servers": ("server", ("hydra", "torch", "deepspeed")),
}
"""Environment by folder of the script, with packages that a plain Python lacks, or the server's environment."""
IN_THE_ACTORS_ENVIRONMENT = ("serve_engine", "nsr-serve-engine")
"""Servers that need vLLM instead of Triton."""


def require_own_interpreter() -> bool:
    """True if the main script is one of ours; if so, it runs in its own Python. Loads no package.

    Raises:
        SystemExit: the script runs in another Python; a sentence that names the right one has been printed.
    """
    path = Path(getattr(sys.modules["__main__"], "__file__", None) or "").resolve()
    if installed := path.name.startswith(COMMAND):
        folder, program = "servers" if path.name.startswith(f"{COMMAND}serve-") else "trainers", path.name
    else:
        folder, program = path.parent.name, f"{path.parent.name}/{path.name}"
    if folder not in NEEDS or not (installed or path.parent.parent == ROOT):
        return False
    name, packages = NEEDS["trainers" if path.stem in IN_THE_ACTORS_ENVIRONMENT else folder]
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        right = (
            f"use the {program} of an environment with nemo_style_rlhf[{name}]"
            if installed
            else f"use .venv-{name}/bin/python {program}"
        )
        print(
            f"error: {sys.executable} has no {missing[0]}, which {program} needs: {right} (`make envs` builds .venv-{name})",
            file=sys.stderr,
        )
        raise SystemExit(2)
    return True


def started_for_this() -> bool:
    """True if Python was started to run only the main script: not under a debugger, a test, or another program."""
    words = list(dropwhile(lambda word: word.startswith("-"), sys.orig_argv[1:]))
    return words[:1] == sys.argv[:1]
