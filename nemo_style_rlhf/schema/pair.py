"""Configuration of both processes of a run, for the commands that take the two together."""

from dataclasses import dataclass, field, replace

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.base import SPEAKER, require, setting
from nemo_style_rlhf.schema.critic import PPOCriticConfig, TrainingServerConfig
from nemo_style_rlhf.schema.remote_critic import RemoteCriticConfig

CHOSEN = ("host", "port", "token", "tls")
"""Keys of the connection between the two processes. The command chooses them."""


@dataclass
class PairConfig(PPOActorConfig):
    """The actor's keys unchanged, the critic server's with the prefix ``critic.``."""

    critic: PPOCriticConfig = field(default_factory=PPOCriticConfig, metadata={SPEAKER: "critic"})
    ranks: int = setting(1, gt=0, expected="a number of ranks above 0")
    """Number of ranks of the actor, each with its own device; on a CPU they share the host."""
    critic_ranks: int = setting(1, gt=0, expected="a number of ranks above 0")
    """Number of ranks of the critic server."""

    @property
    def critic_server(self) -> PPOCriticConfig:
        """The critic server's configuration, without a critic if the algorithm has none."""
        return replace(self.critic, value_model=replace(self.critic.value_model, enabled=self.algorithm.uses_critic))

    def validate(self) -> None:
        super().validate()
        if self.algorithm.uses_critic and not self.critic.value_model.enabled:
            raise UserError(
                "critic.value_model.enabled=false but algorithm.advantage_estimator=gae needs the critic: leave it out, this "
                "command sets it by the algorithm"
            )
        size = self.generation.sharing_ranks
        require(self.ranks % size == 0, "ranks", self.ranks, f"a multiple of generation.tensor_parallel_size={size}")


@dataclass
class LaunchedConfig(PairConfig):
    """Configuration of a command that starts both processes. ``run.output_dir`` gets the folders ``actor`` and ``critic``."""

    restarts: int = setting(3, ge=0, expected="a number from 0 up")
    """Number of restarts of processes that died, before the next new step; one more death ends the run."""

    @property
    def unread(self) -> tuple[str, ...]:
        """Like :attr:`PPOActorConfig.unread`."""
        return super().unread if self.uses_critic_process else (*super().unread, "critic")

    def validate(self) -> None:
        super().validate()
        if self.uses_critic_process and not self.critic.model.path:
            raise UserError(
                "critic.model.path is not set: give the reward model, critic.model.path=REWARD_MODEL, or with another reward the "
                "model from which the critic starts and critic.reward_model.combine_rm_and_critic_server=false"
            )
        if self.reward.critic.weight != 0 and not self.critic.reward_model.combine_rm_and_critic_server:
            raise UserError(
                f"reward.critic.weight={self.reward.critic.weight:g} asks the critic server's reward model, which "
                "critic.reward_model.combine_rm_and_critic_server=false leaves out: choose another reward, such as "
                "reward=function"
            )
        for section, given, default in (
            ("remote_critic_rm", self.remote_critic_rm, RemoteCriticConfig()),
            ("critic.server", self.critic.server, TrainingServerConfig()),
        ):
            for name in CHOSEN:
                if getattr(given, name) != getattr(default, name):
                    raise UserError(
                        f"{section}.{name} is set but this command starts a critic server with an address and a token of its "
                        "own: leave it out, or start server and actor each by its own command"
                    )
