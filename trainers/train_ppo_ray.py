"""PPO on a Ray cluster by one command: python trainers/train_ppo_ray.py --help"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for a Python that does not know the package

from nemo_style_rlhf.programs import train_ppo_ray

if __name__ == "__main__":
    train_ppo_ray()
