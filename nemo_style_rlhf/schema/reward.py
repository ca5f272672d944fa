"""Reward sources; the rewards of several sources add up, each times its weight."""

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.base import require, setting
from nemo_style_rlhf.schema.judge import EndpointRewardConfig, JudgeRewardConfig
from nemo_style_rlhf.schema.paths import CHECK, function_file
from nemo_style_rlhf.schema.remote_critic import Peer, RemoteCriticConfig


@dataclass
class CriticRewardConfig:
    """The reward model of the critic process (remote_critic_rm)."""

    weight: float = 1.0
    """With 0, the reward model is not asked."""


@dataclass
class RewardServerConfig(RemoteCriticConfig):
    """A reward-only server (servers/serve_reward_model.py). It takes texts and conversations, so that its tokenizer and its
    chat template may differ from the policy's."""

    peer: ClassVar[Peer] = Peer(
        "reward server", "servers/serve_reward_model.py", "reward.server", "model.path=REWARD_MODEL"
    )

    port: int = setting(5568, gt=0, lt=65536, expected="a TCP port, 1 to 65535")
    """server.port of the reward server."""
    weight: float = 0.0
    """Weight of these rewards in the sum over all sources; with 0 the server is not asked."""
    replicas: list[str] = field(default_factory=list)
    """host:port of further servers of the same reward model. Each request goes to the least busy server; a server that does not
    answer, or comes back with another model, is left out and asked again later."""
    cooldown_s: float = setting(10.0, ge=0, expected="seconds from 0 up")
    """Seconds for which a failed replica is left out, while others answer."""

    def validate(self) -> None:
        super().validate()
        for replica in self.replicas:
            host, _, port = replica.rpartition(":")
            whole = bool(host) and (":" not in host or host.startswith("["))
            require(whole and port.isdigit(), "reward.server.replicas", replica, "host:port, an IPv6 host in brackets")

    @property
    def servers(self) -> "list[RewardServerConfig]":
        """One configuration per server. With several servers, a failed request goes to another server at once."""
        if not self.replicas:
            return [self]
        places = [
            (self.host, self.port),
            *((host, int(port)) for host, _, port in (r.rpartition(":") for r in self.replicas)),
        ]
        return [replace(self, host=host, port=port, retries=0, replicas=[]) for host, port in places]


@dataclass
class FunctionRewardConfig:
    """A Python function `reward_func(queries, prompts, labels)` in a file, called in worker processes.

    It gets lists of equal length (queries are prompt and response together) and returns the rewards, or a dict with `rewards`,
    optionally `scores` (for algorithm.filter) and `extra_logs` (name to one number per sample, or one for all): OpenRLHF's
    contract. It may be a coroutine function, and may ask for `completions` (the responses) and for the rows' fields by name.
    """

    path: str | None = field(default=None, metadata={CHECK: function_file})
    """Python file with the function."""
    name: str = "reward_func"
    """Name of the function in the file."""
    weight: float = 0.0
    """Weight of these rewards in the sum over all sources; with 0 the function is not called."""
    per_sample: bool = False
    """Call the function once per sample, with lists of one, so that a time limit or an error affects only that sample."""
    timeout_s: float = setting(60.0, gt=0, expected="seconds above 0")
    """Longest run of one call, after the file's import; then its process is killed."""
    processes: int = setting(2, gt=0, expected="a number above 0")
    """Maximum number of calls at a time."""

    def validate(self) -> None:
        if self.weight != 0 and not self.path:
            raise UserError(f"reward.function.weight={self.weight} needs the function's file: set reward.function.path")


@dataclass
class RewardConfig:
    """Sources of rewards, and their weights."""

    critic: CriticRewardConfig = field(default_factory=CriticRewardConfig)
    server: RewardServerConfig = field(default_factory=RewardServerConfig)
    function: FunctionRewardConfig = field(default_factory=FunctionRewardConfig)
    endpoints: EndpointRewardConfig = field(default_factory=EndpointRewardConfig)
    judge: JudgeRewardConfig = field(default_factory=JudgeRewardConfig)
    special_tokens: bool = False
    """Show a response's special tokens, such as a `<think>` that is one, to functions, endpoints, judges and reward servers, but
    not the token that ends it."""
    on_error: str = setting("stop", among=("stop", "mask"))
    """Reaction to a source that fails on samples, or gives them NaN or infinite rewards. stop: end the run with the reason; mask:
    leave the samples out of training and count them in train_rollouts/reward_failures."""

    @property
    def weights(self) -> dict[str, float]:
        """Weight by source, for the sources in use."""
        sources = {name: getattr(self, name).weight for name in ("critic", "server", "function", "endpoints", "judge")}
        return {name: weight for name, weight in sources.items() if weight != 0}

    @property
    def unread(self) -> tuple[str, ...]:
        """Sources that are not in use, as sections of a configuration whose files are not read."""
        return tuple(f"reward.{name}" for name in ("server", "function", "judge") if name not in self.weights)

    def require_source(self) -> None:
        """Raise UserError if all sources are unused."""
        if not self.weights:
            raise UserError(
                "no reward source is in use: give one of reward.critic, server, function, endpoints or judge a weight other "
                "than 0, or an environment (agent.path)"
            )

    def validate(self) -> None:
        for name, weight in self.weights.items():
            require(math.isfinite(weight), f"reward.{name}.weight", weight, "a finite number")
