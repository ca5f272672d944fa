"""Places the processes of a run on a Ray cluster: pure arithmetic, without Ray.

A bundle is what Ray reserves on one node: the GPUs and CPUs of the ranks that are there together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_style_rlhf.launch.ppo_run import ACTOR, CRITIC
from nemo_style_rlhf.schema.ray import PPORayConfig

STRATEGIES = {"separate": "SPREAD", "colocated": "PACK"}
"""Ray's strategy for the bundles; Ray follows it where the nodes allow it."""


@dataclass(frozen=True)
class Slot:
    """The place of one process."""

    program: str
    rank: int
    ranks: int
    """Number of ranks of the program."""
    local_rank: int
    local_ranks: int
    """Number of ranks of the program in the same bundle."""
    bundle: int
    gpus: int
    """Number of GPUs that Ray gives to this process. 0 on a CPU, and for one that shares the GPUs of other processes."""
    shares: tuple[int, ...] = ()
    """Local ranks of the actor in the same bundle whose GPUs this process uses."""

    @property
    def name(self) -> str:
        return f"{self.program}-{self.rank}" if self.ranks > 1 else self.program


@dataclass(frozen=True)
class Placement:
    """The bundles of a run, and the slots in them."""

    bundles: tuple[dict[str, float], ...]
    strategy: str
    slots: tuple[Slot, ...]

    def of(self, program: str) -> list[Slot]:
        """The slots of a program, by rank."""
        return sorted((slot for slot in self.slots if slot.program == program), key=lambda slot: slot.rank)

    def sharers(self, slot: Slot) -> list[Slot]:
        """The slots whose GPUs the process at ``slot`` sees, in the order of their numbers there. Ranks see the GPUs of all ranks
        next to them, and each uses the GPU of its local rank."""
        beside = [each for each in self.slots if each.bundle == slot.bundle]
        if slot.shares:
            found = [each for each in beside if each.program == ACTOR and each.local_rank in slot.shares]
        else:
            found = [each for each in beside if each.program == slot.program and each.gpus]
        return sorted(found, key=lambda each: each.local_rank)


def engine_names(count: int) -> list[str]:
    return [f"engine-{number}" for number in range(count)]


def place(config: PPORayConfig, *, on_gpus: bool) -> Placement:
    """The placement of a run. Each of its ranks has a GPU if there are any."""
    gpus = int(on_gpus)
    size = config.generation.tensor_parallel_size
    engines = engine_names(config.launched_engines)
    actor = _ranks(ACTOR, config.ranks, config.ray.actor_nodes, gpus=gpus)
    critic = (
        _ranks(CRITIC, config.critic_ranks, config.ray.critic_nodes, gpus=gpus) if config.uses_critic_process else []
    )
    slots: list[Slot] = []
    if config.ray.placement == "colocated":
        here = config.ranks // config.ray.actor_nodes // size
        slots = [*actor, *(_sharing(slot, (*range(slot.local_ranks),) if on_gpus else ()) for slot in critic)]
        for number, name in enumerate(engines):
            first = number % here * size
            shared = tuple(range(first, first + size)) if on_gpus else ()
            slots.append(Slot(name, 0, 1, 0, 1, number // here, 0, shared))
    else:
        bundles = 0
        for group in (critic, actor, *([Slot(name, 0, 1, 0, 1, 0, gpus * size)] for name in engines)):
            slots += [_moved(slot, bundles) for slot in group]
            bundles += len({slot.bundle for slot in group})
    return Placement(_bundles(slots, config.ray.cpus), STRATEGIES[config.ray.placement], tuple(slots))


def remedy(bundles: Sequence[dict[str, float]], nodes: Sequence[dict[str, float]]) -> str:
    """Advise the user what to change so that ``nodes``, by what each has, hold ``bundles``."""
    needed, there = sum(each["CPU"] for each in bundles), sum(each["CPU"] for each in nodes)
    largest, most = max(each["CPU"] for each in bundles), max((each["CPU"] for each in nodes), default=0.0)
    if nodes and (needed > there or largest > most):
        part = f", {largest:g} of them on one node" if largest > most else ""
        return (
            f"Ray counts ray.cpus for each process, {needed:g} CPUs in all{part}: start nodes with a larger `ray start "
            "--num-cpus`, which counts and limits none, or add nodes"
        )
    return "add nodes, end other jobs, or give fewer ranks and engines"


def _ranks(program: str, ranks: int, nodes: int, *, gpus: int) -> list[Slot]:
    """The ranks of a program in ``nodes`` bundles from 0 up."""
    here = ranks // nodes
    return [Slot(program, rank, ranks, rank % here, here, rank // here, gpus) for rank in range(ranks)]


def _moved(slot: Slot, bundles: int) -> Slot:
    return Slot(**{**vars(slot), "bundle": slot.bundle + bundles})


def _sharing(slot: Slot, shares: tuple[int, ...]) -> Slot:
    return Slot(**{**vars(slot), "gpus": 0, "shares": shares})


def _bundles(slots: Sequence[Slot], cpus: int) -> tuple[dict[str, float], ...]:
    bundles: list[dict[str, float]] = []
    for number in range(1 + max(slot.bundle for slot in slots)):
        there = [slot for slot in slots if slot.bundle == number]
        gpus = sum(slot.gpus for slot in there)
        bundles.append({"CPU": float(cpus * len(there)), **({"GPU": float(gpus)} if gpus else {})})
    return tuple(bundles)
