"""Supervised fine-tuning: python trainers/train_sft.py --help"""

from nemo_style_rlhf.checkpoint.starts import is_done
from nemo_style_rlhf.launch.entry import entry_point
from nemo_style_rlhf.schema.supervised import SFTConfig


@entry_point(SFTConfig, config_name="sft")
def main(config: SFTConfig) -> None:
    """Everything else is in supervised/sft.py."""
    if is_done(config, longer="trainer.max_steps"):
        return
    from nemo_style_rlhf.supervised.sft import train_sft

    train_sft(config)


if __name__ == "__main__":
    main()
