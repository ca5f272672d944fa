"""Memory of a process in each phase; the phase that holds most determines the peak."""

from collections import Counter
from dataclasses import dataclass

GIB = 2**30
ACTOR, CRITIC, ENGINE = "actor", "critic server", "engine"
COMPONENTS = (
    "libraries",
    "weights",
    "fp32 masters",
    "gradients",
    "optimizer states",
    "optimizer step",
    "checkpoint",
    "activations",
    "logits",
    "reference",
    "reward model",
    "vLLM weights",
    "KV cache",
    "free for vLLM",
    "weights in transit",
    "published weights",
)
"""Rows of the table, in its order."""


@dataclass(frozen=True)
class Phase:
    name: str
    parts: Counter[str]
    """Bytes of each component on one rank."""
    turn: str | None = None
    """The phase of a step in which the process has the device, with time sharing."""

    @property
    def total(self) -> int:
        return self.parts.total()


@dataclass(frozen=True)
class ProcessPlan:
    name: str
    phases: tuple[Phase, ...]
    ranks: int

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)
