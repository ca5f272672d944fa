"""The actor process: PPO on a policy, against a running critic server (servers/serve_ppo_critic.py)."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for a Python without the package installed

import nemo_style_rlhf  # noqa: F401  sets up OpenMP

if __name__ == "__main__":  # processes that multiprocessing starts import this script, too, but must not run it
    from nemo_style_rlhf.programs import train_ppo_actor

    train_ppo_actor()
