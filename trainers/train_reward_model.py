"""Train a reward model on preference pairs: python trainers/train_reward_model.py --help"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for a Python that does not know the package

from nemo_style_rlhf.launch.entry import entry_point
from nemo_style_rlhf.schema.supervised import RewardModelConfig


@entry_point(RewardModelConfig, config_name="reward_model")
def main(config: RewardModelConfig) -> None:
    """Everything else is in supervised/reward_model.py."""
    from nemo_style_rlhf.checkpoint.owner import owned
    from nemo_style_rlhf.checkpoint.starts import is_done

    if is_done(config, longer="trainer.max_steps"):
        return
    with owned(config.run, "trainer"):
        from nemo_style_rlhf.supervised.reward_model import train_reward_model

        train_reward_model(config)


if __name__ == "__main__":
    main()
