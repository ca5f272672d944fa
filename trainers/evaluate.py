"""Compare checkpoints on the same prompts: python trainers/evaluate.py --help"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for a Python that does not know the package

from nemo_style_rlhf.programs import evaluate

if __name__ == "__main__":
    evaluate()
