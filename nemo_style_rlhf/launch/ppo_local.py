"""A run on this host: critic server and actor as child processes, each of which leads a session of its own."""

import secrets
from pathlib import Path

from nemo_style_rlhf.launch.follow_up import after_ppo
from nemo_style_rlhf.launch.ports import free_ports
from nemo_style_rlhf.launch.ppo_run import ACTOR, CRITIC, PPORun, configurations, configured, require_environments
from nemo_style_rlhf.launch.program import CHECKED, Program
from nemo_style_rlhf.launch.starting import PART
from nemo_style_rlhf.schema.local import PPOLocalConfig

TOKEN = "NSR_LOCAL_TOKEN"
"""Environment variable of the token. It differs from the usual name, under which users may give the token of a reward server."""


def run_on_this_host(config: PPOLocalConfig) -> int:
    """Run actor and critic server to the end; returns the actor's exit code.

    Raises:
        UserError: one of them refused its configuration or its inputs, or an environment is missing.
        ProgramFailed: one of them died too often.
    """
    folder = Path(config.run.output_dir).resolve()
    programs = make_programs(config, folder)
    run = PPORun(programs, folder, restarts=config.restarts, then=after_ppo(config))
    try:
        return run.to_its_end()
    finally:
        run.close()


def make_programs(config: PPOLocalConfig, folder: Path) -> list[Program]:
    """The critic server, if the run needs one, and the actor; their configurations are files in ``folder/configs``."""
    require_environments(config)
    (port,) = free_ports(1)
    values = configurations(config, folder)
    connection, server = values[ACTOR]["remote_critic_rm"], values[CRITIC]["server"]
    connection["port"] = server["port"] = port
    connection["token"]["token_env"] = server["token"]["token_env"] = TOKEN
    token = {TOKEN: secrets.token_hex(32)}

    def program(name: str, ranks: int, devices: list[str] | None) -> Program:
        visible = {} if devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
        argv = configured(name, folder, values[name])
        return Program(name, argv, {**token, **visible, PART: name, CHECKED: "yes"}, ranks, Path.cwd())

    made = [
        program(CRITIC, config.critic_ranks, config.critic_devices),
        program(ACTOR, config.ranks, config.devices),
    ]
    return made if config.uses_critic_process else made[1:]
