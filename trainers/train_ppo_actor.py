"""The actor process: PPO on a policy, against a running critic server (servers/serve_ppo_critic.py)."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for a Python that does not know the package

from nemo_style_rlhf.launch.entry import entry_point
from nemo_style_rlhf.launch.preemption import hold_stop_signal
from nemo_style_rlhf.schema.actor import PPOActorConfig


@entry_point(PPOActorConfig, config_name="ppo_actor")
def main(config: PPOActorConfig) -> None:
    hold_stop_signal()
    from nemo_style_rlhf.checkpoint.owner import owned
    from nemo_style_rlhf.checkpoint.starts import is_done

    if is_done(config, longer="algorithm.max_steps"):
        return
    with owned(config.run, "trainer"):
        from nemo_style_rlhf.ppo.run import run  # loads torch; --help and what is refused should not wait for it

        run(config)


if __name__ == "__main__":
    main()
