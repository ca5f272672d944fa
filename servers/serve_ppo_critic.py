"""The critic process: python servers/serve_ppo_critic.py --help"""

import sys
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for a Python that does not know the package

from nemo_style_rlhf.launch.entry import entry_point
from nemo_style_rlhf.schema.critic import PPOCriticConfig


@entry_point(PPOCriticConfig, config_name="ppo_critic")
def main(config: PPOCriticConfig) -> None:
    """Refuse a folder in use and a locked or unlocked door before torch is imported; more in critic_service/process.py."""
    from nemo_style_rlhf.checkpoint.owner import owned

    with owned(config.run, "server"):
        from nemo_style_rlhf.critic_service.triton import preflight

        address = preflight(config.server)
        from nemo_style_rlhf.critic_service.critic_server import load_critic_server
        from nemo_style_rlhf.critic_service.process import serve

        serve(config.run, config.server, address, partial(load_critic_server, config))


if __name__ == "__main__":
    main()
