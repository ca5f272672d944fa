"""Configuration of a run on a Ray cluster, started by one command."""

from dataclasses import dataclass, field

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.base import require, setting
from nemo_style_rlhf.schema.pair import LaunchedConfig


@dataclass
class RayConfig:
    """The cluster, and the placement of a run's processes on it."""

    address: str = "auto"
    """The cluster's head, HOST:PORT; auto takes RAY_ADDRESS (`ray job submit` sets it), or the cluster of this host."""
    placement: str = setting("separate", among=("separate", "colocated"))
    """separate (GPUs of their own for actor, critic server and engines) or colocated (the same GPUs for all three). The preset
    placement=... sets it."""
    actor_nodes: int = setting(1, gt=0, expected="a number above 0")
    """Number of equal parts into which the actor's ranks are divided, each on one node."""
    critic_nodes: int = setting(1, gt=0, expected="a number above 0")
    """The same for the critic server's ranks."""
    cpus: int = setting(1, gt=0, expected="a number above 0")
    """Number of CPUs that Ray reserves for each process; it does not limit their use."""
    wait_s: float = setting(300.0, gt=0, expected="seconds above 0")
    """Longest wait for nodes that can hold the run, at its start and after the loss of a node."""
    require_token: bool = True
    """Refuse a cluster that lets callers in without a token (RAY_AUTH_MODE=token, see docs/ray.md): they can run code on it."""


@dataclass
class PPORayConfig(LaunchedConfig):
    """Configuration of `trainers/train_ppo_ray.py`."""

    ray: RayConfig = field(default_factory=RayConfig)

    @property
    def launched_engines(self) -> int:
        """Number of engines that the command starts."""
        return self.generation.engines.count if self.generation.engines.launch else 0

    def validate(self) -> None:
        super().validate()
        for ranks, nodes, given, parts in (
            ("ranks", "ray.actor_nodes", self.ranks, self.ray.actor_nodes),
            ("critic_ranks", "ray.critic_nodes", self.critic_ranks, self.ray.critic_nodes),
        ):
            require(given % parts == 0, ranks, given, f"a multiple of {nodes}={parts}")
        if self.ray.placement == "colocated":
            self._validate_colocated()

    def _validate_colocated(self) -> None:
        """Raise UserError if the processes do not fit the same GPUs."""
        engines, size = self.launched_engines, self.generation.tensor_parallel_size
        if engines and engines * size != self.ranks:
            raise UserError(
                "placement=colocated needs as many GPUs for the engines as for the actor, but "
                f"generation.engines.count={engines} x generation.tensor_parallel_size={size} is {engines * size} and "
                f"ranks={self.ranks}: change one of them, or give placement=separate"
            )
        per_node = self.ranks // self.ray.actor_nodes
        if engines and per_node % size:
            raise UserError(
                f"generation.tensor_parallel_size={size} does not divide the {per_node} ranks of a node (ranks={self.ranks}, "
                f"ray.actor_nodes={self.ray.actor_nodes}): an engine's GPUs are on one node"
            )
        critic = (self.critic_ranks, self.ray.critic_nodes)
        if self.uses_critic_process and critic != (self.ranks, self.ray.actor_nodes):
            raise UserError(
                f"placement=colocated needs the actor's GPUs for the critic server, but critic_ranks={critic[0]} on "
                f"ray.critic_nodes={critic[1]} differ from ranks={self.ranks} on ray.actor_nodes={self.ray.actor_nodes}: give "
                "both the same, or placement=separate"
            )
