"""DPO, IPO and cDPO on preference pairs: python trainers/train_dpo.py --help"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for a Python that does not know the package

from nemo_style_rlhf.launch.entry import entry_point
from nemo_style_rlhf.schema.supervised import DPOConfig


@entry_point(DPOConfig, config_name="dpo")
def main(config: DPOConfig) -> None:
    """Everything else is in supervised/dpo.py."""
    from nemo_style_rlhf.checkpoint.owner import owned
    from nemo_style_rlhf.checkpoint.starts import is_done

    if is_done(config, longer="trainer.max_steps"):
        return
    with owned(config.run, "trainer"):
        from nemo_style_rlhf.supervised.dpo import train_dpo

        train_dpo(config)


if __name__ == "__main__":
    main()
