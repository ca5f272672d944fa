"""Show tokenised training samples: python trainers/inspect_data.py --help"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for a Python that does not know the package

from nemo_style_rlhf.launch.entry import entry_point
from nemo_style_rlhf.schema.inspection import InspectDataConfig


@entry_point(InspectDataConfig, config_name="inspect_data")
def main(config: InspectDataConfig) -> None:
    """Everything else is in supervised/inspection.py."""
    from nemo_style_rlhf.supervised.inspection import inspect_data

    inspect_data(config)


if __name__ == "__main__":
    main()
