"""Where the repository and the interpreters of its two environments are."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ACTOR_PYTHON = ROOT / ".venv-actor" / "bin" / "python"
SERVER_PYTHON = ROOT / ".venv-server" / "bin" / "python"
ENTRY_POINTS = [*sorted((ROOT / "trainers").glob("*.py")), *sorted((ROOT / "servers").glob("*.py"))]


def own_python(script: Path) -> str:
    """The interpreter of an entry point, relative to ``ROOT``."""
    return {"trainers": ".venv-actor/bin/python", "servers": ".venv-server/bin/python"}[script.parent.name]
