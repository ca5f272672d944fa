"""Where the repository and the interpreters of its two environments are."""

from pathlib import Path

from nemo_style_rlhf.launch.interpreter import IN_THE_ACTORS_ENVIRONMENT
from nemo_style_rlhf.launch.program import ACTOR_PYTHON as ACTOR_PYTHON
from nemo_style_rlhf.launch.program import PYTHON
from nemo_style_rlhf.launch.program import ROOT as ROOT
from nemo_style_rlhf.launch.program import SERVER_PYTHON as SERVER_PYTHON

ENTRY_POINTS = [*sorted((ROOT / "trainers").glob("*.py")), *sorted((ROOT / "servers").glob("*.py"))]


def own_python(script: Path) -> str:
    """The interpreter of an entry point, relative to ``ROOT``."""
    folder = "trainers" if script.stem in IN_THE_ACTORS_ENVIRONMENT else script.parent.name
    return str(PYTHON[folder].relative_to(ROOT))
