"""Print a run's samples as JSON Lines: python trainers/export_rollouts.py --help"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for a Python that does not know the package

from nemo_style_rlhf.programs import export_rollouts

if __name__ == "__main__":
    export_rollouts()
