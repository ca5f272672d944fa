"""Memory of processes that time-share one set of GPUs (``placement.share=turns``): each turn has a peak of its own."""

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from nemo_style_rlhf.planning.device import Device
from nemo_style_rlhf.planning.phases import ACTOR, CRITIC, ENGINE, GIB, Phase, ProcessPlan
from nemo_style_rlhf.schema.placement import GENERATE, SCORE, TRAIN
from nemo_style_rlhf.schema.plan import PlanConfig

TURNS = (GENERATE, SCORE, TRAIN)
OTHERS = {ACTOR: TRAIN, CRITIC: SCORE, ENGINE: GENERATE}
"""The turn of a process's phases that :data:`TURN_OF` does not name."""
TURN_OF = {"loading vLLM": GENERATE, "rollout": GENERATE, "weights to vLLM": GENERATE, "log-probabilities": SCORE}
STATES = {"fp32 masters", "optimizer states", "gradients"}
GENERATOR = {"vLLM weights", "KV cache", "free for vLLM"}
AWAY = {GENERATE: STATES | {"weights", "reference"}, SCORE: STATES | GENERATOR, TRAIN: GENERATOR}
"""Components of the actor that are in host memory during each turn."""


def in_turns(config: PlanConfig, device: Device) -> bool:
    """True if time sharing saves memory: on a CPU, host memory is the device."""
    return config.placement.in_turns and device.cuda


def taking_turns(plan: ProcessPlan) -> ProcessPlan:
    """The plan of a process that leaves the device between its turns."""
    phases = []
    for phase in plan.phases:
        turn = TURN_OF.get(phase.name, OTHERS[plan.name])
        away = AWAY[turn] if plan.name == ACTOR else set()
        parts = Counter({name: size for name, size in phase.parts.items() if name not in away})
        phases.append(replace(phase, parts=parts, turn=turn))
    return replace(plan, phases=tuple(phases))


def peaks(processes: Collection[ProcessPlan]) -> dict[str, dict[str, int]]:
    """Bytes of each process on a device at the peak of each turn; only libraries while it sleeps."""
    return {turn: {plan.name: _peak(plan, turn) for plan in processes} for turn in TURNS}


def largest(processes: Collection[ProcessPlan]) -> int:
    """Bytes of all processes together on a device, in the turn that needs most."""
    return max(sum(each.values()) for each in peaks(processes).values())


def described(processes: Collection[ProcessPlan]) -> str:
    turns = []
    for turn, sizes in peaks(processes).items():
        shares = ", ".join(f"{name} {size / GIB:.2f}" for name, size in sizes.items())
        turns.append(f"{turn} {sum(sizes.values()) / GIB:.2f} GiB ({shares})")
    return "; ".join(turns)


def _peak(plan: ProcessPlan, turn: str) -> int:
    asleep = Phase("asleep", Counter({"libraries": plan.phases[0].parts["libraries"]}))
    return max([asleep, *(phase for phase in plan.phases if phase.turn == turn)], key=lambda phase: phase.total).total
