"""KTO on judged responses: python trainers/train_kto.py --help"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for a Python that does not know the package

from nemo_style_rlhf.launch.entry import entry_point
from nemo_style_rlhf.schema.supervised import KTOConfig


@entry_point(KTOConfig, config_name="kto")
def main(config: KTOConfig) -> None:
    """Everything else is in supervised/kto.py."""
    from nemo_style_rlhf.checkpoint.owner import owned
    from nemo_style_rlhf.checkpoint.starts import is_done

    if is_done(config, longer="trainer.max_steps"):
        return
    with owned(config.run, "trainer"):
        from nemo_style_rlhf.supervised.kto import train_kto

        train_kto(config)


if __name__ == "__main__":
    main()
