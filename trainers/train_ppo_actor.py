"""The actor process: PPO on a policy, against a running critic server (servers/serve_ppo_critic.py)."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for a Python that does not know the package

from nemo_style_rlhf.programs import train_ppo_actor

if __name__ == "__main__":
    train_ppo_actor()
