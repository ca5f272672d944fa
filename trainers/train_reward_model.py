"""Train a reward model on preference pairs: python trainers/train_reward_model.py --help"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for a Python that does not know the package

from nemo_style_rlhf.programs import train_reward_model

if __name__ == "__main__":
    train_reward_model()
