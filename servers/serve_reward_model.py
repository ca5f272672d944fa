"""A reward model alone: python servers/serve_reward_model.py --help"""

import sys
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for a Python that does not know the package

from nemo_style_rlhf.launch.entry import entry_point
from nemo_style_rlhf.schema.reward_server import RewardServerProcessConfig


@entry_point(RewardServerProcessConfig, config_name="reward_server")
def main(config: RewardServerProcessConfig) -> None:
    """Refuse a locked or unlocked door before torch is even imported; the rest is in critic_service/process.py."""
    from nemo_style_rlhf.critic_service.triton import preflight

    address = preflight(config.server)
    from nemo_style_rlhf.critic_service.process import serve
    from nemo_style_rlhf.critic_service.reward_server import load_reward_server

    serve(config.run, config.server, address, partial(load_reward_server, config))


if __name__ == "__main__":
    main()
