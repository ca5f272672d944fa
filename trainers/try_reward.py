"""Try a reward on a file of responses: python trainers/try_reward.py --help"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for a Python that does not know the package

from nemo_style_rlhf.programs import try_reward

if __name__ == "__main__":
    try_reward()
