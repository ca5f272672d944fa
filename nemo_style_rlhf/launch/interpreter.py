"""Whether an entry script runs in its own environment. Standard library only: another Python may lack everything else."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDS = {
    "trainers": (".venv-actor", ("hydra", "torch", "requests", "pytorch_lightning")),
    "servers": (".venv-server", ("hydra", "torch", "pytriton")),
}
"""Environment by folder of the script, with packages that the other environment or a plain Python lacks."""


def require_own_interpreter() -> bool:
    """Whether the main script is one of ours; if so, it runs in its own Python. Loads no package.

    Raises:
        SystemExit: the script runs in another Python; a sentence that names the right one has been printed.
    """
    path = Path(getattr(sys.modules["__main__"], "__file__", None) or "").resolve()
    if path.parent.parent != ROOT or path.parent.name not in NEEDS:
        return False
    script = f"{path.parent.name}/{path.name}"
    environment, packages = NEEDS[path.parent.name]
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        print(
            f"error: {sys.executable} has no {missing[0]}, which {script} needs: use {environment}/bin/python {script} "
            f"(`make envs` builds {environment})",
            file=sys.stderr,
        )
        raise SystemExit(2)
    return True
