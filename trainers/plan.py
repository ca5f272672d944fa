"""Will a PPO run fit? The memory of both processes before they start: python trainers/plan.py --help"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for a Python that does not know the package

from nemo_style_rlhf.launch.entry import entry_point
from nemo_style_rlhf.schema.plan import PlanConfig


@entry_point(PlanConfig, config_name="plan")
def main(config: PlanConfig) -> None:
    """Everything else is in planning/run.py."""
    from nemo_style_rlhf.planning.run import plan

    plan(config)


if __name__ == "__main__":
    main()
