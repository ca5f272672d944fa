"""Supervised fine-tuning: python trainers/train_sft.py --help"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for a Python that does not know the package

from nemo_style_rlhf.launch.entry import entry_point
from nemo_style_rlhf.schema.supervised import SFTConfig


@entry_point(SFTConfig, config_name="sft")
def main(config: SFTConfig) -> None:
    """Everything else is in supervised/sft.py."""
    from nemo_style_rlhf.checkpoint.owner import owned
    from nemo_style_rlhf.checkpoint.starts import is_done

    if is_done(config, longer="trainer.max_steps"):
        return
    with owned(config.run, "trainer"):
        from nemo_style_rlhf.supervised.sft import train_sft

        train_sft(config)


if __name__ == "__main__":
    main()
