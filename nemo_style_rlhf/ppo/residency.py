"""Time sharing of one set of devices by generation, critic and trainer: ``placement.share=turns``."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import psutil
import torch

from nemo_style_rlhf.critic_service.remote_critic import RemoteCritic
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.engine.memory_use import GIB, give_back, held_bytes
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.rollout.producer import Timers
from nemo_style_rlhf.rollout.queue import BatchQueue
from nemo_style_rlhf.schema.placement import GENERATE, SCORE, TRAIN

log = logging.getLogger(__name__)
PHASES: Mapping[str, str] = {
    GENERATE: "the engines: weights and cache",
    SCORE: "the critic, which answers and trains, and the trainer's weights, for log-probabilities",
    TRAIN: "the trainer: weights, gradients, optimizer states",
}
"""The components on the devices in each phase of a step; the others sleep. A reference is there only while it computes."""


@dataclass(frozen=True)
class Memory:
    """Bytes of a device, or on a CPU of this process and of the host."""

    used: int
    free: int

    @staticmethod
    def now(device: torch.device) -> "Memory":
        """Measure. Memory that this process has freed but keeps for itself counts as used, as it does for others."""
        if device.type != "cuda":
            return Memory(held_bytes(), psutil.virtual_memory().available)
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        return Memory(total - free, free)


@dataclass
class Needs:
    """The most bytes that each phase has taken in a turn. Its next turn is checked against this."""

    taken: dict[str, int] = field(default_factory=dict)

    def note(self, phase: str, *, before: Memory, after: Memory) -> None:
        """Record a turn of ``phase``: memory ``before`` it, when the others slept, and ``after`` it."""
        self.taken[phase] = max(self.taken.get(phase, 0), after.used - before.used)

    def check(self, phase: str, memory: Memory, held: Mapping[str, int]) -> None:
        """Check that ``phase`` fits into ``memory``, measured while everything outside the phase sleeps.

        Args:
            held: bytes that each process still holds, by name.

        Raises:
            UserError: the phase took more in an earlier turn than is free.
        """
        needed = self.taken.get(phase, 0)
        if needed > memory.free:
            raise UserError(
                f"placement.share=turns: the phase {phase} ({PHASES[phase]}) took {_gib(needed)} in an earlier turn but "
                f"{_gib(memory.free)} are free, while {_gib(memory.used)} are in use ({_listed(held)}): end what else runs "
                "there, or lower generation.gpu_memory_utilization, generation.kv_cache_gib or engine.micro_batch_tokens"
            )


class Residency:
    """Decides which components are on the devices. Every rank makes the same calls of :meth:`enter`."""

    def __init__(
        self, engine: Engine, queue: BatchQueue, critic: RemoteCritic | None, ranks: Ranks, *, in_turns: bool
    ) -> None:
        """Without ``in_turns`` all components stay, and nothing here has an effect. The critic is assumed to be awake."""
        self._engine, self._queue, self._critic, self._ranks, self._in_turns = engine, queue, critic, ranks, in_turns
        self._phase = ""
        self._needs = Needs()
        self._began = Memory(0, 0)
        self._held: dict[str, int] = {}
        """Bytes that sleeping processes still hold, by name."""
        self._seconds, self._moved, self._peak = 0.0, 0, 0

    @contextmanager
    def phase(self, phase: str, timers: Timers) -> Iterator[None]:
        """:meth:`enter` for the work of one phase of a step. Its components stay on the devices until another phase begins."""
        self.enter(phase, timers)
        yield

    def enter(self, phase: str, timers: Timers | None = None) -> None:
        """Put components without a part in ``phase`` to sleep, check the free memory, and wake the others.

        Args:
            timers: charged with the handover.

        Raises:
            UserError: the phase does not fit; or a part of it did not wake.
            ServerRestarted, ServerUnreachable: the critic was lost.
        """
        self._enter(phase, self._ranks)
        if timers is not None and self._in_turns:
            timers.lap("handover")

    def enter_alone(self, phase: str) -> None:
        """:meth:`enter`, for the rank that makes batches for all others; their components sleep meanwhile."""
        self._enter(phase, Ranks(alone=True))

    def _enter(self, phase: str, ranks: Ranks) -> None:
        left = self._phase
        # The first of several ranks may have gone through other phases by itself, except for the trainer's.
        if not self._in_turns or (phase == left and (ranks.size == 1 or phase == TRAIN)):
            return
        started, ended, already = perf_counter(), Memory.now(self._engine.device), phase == left
        if left and not already:
            self._needs.note(left, before=self._began, after=ended)
        self._phase = ""
        ranks.everyone(lambda: self._sleep(phase))
        began = Memory.now(self._engine.device)
        if not already:
            self._began = began
        # On a CPU, sleep frees little, and what a phase took is still this process's own.
        judged = self._engine.device.type == "cuda" and not already
        ranks.everyone(lambda: self._needs.check(phase, began, self._held) if judged else None)
        ranks.everyone(lambda: self._wake(phase))
        if phase == SCORE and self._critic is not None:
            self._critic.release()
        self._phase = phase
        self._seconds += perf_counter() - started
        self._moved += max(ended.used - began.used, 0)
        self._peak = max(self._peak, ended.used)
        if self._ranks.is_first:
            log.info(
                "turn of %s after %s: %s in use before, %s while the others sleep, %s free (%s)", phase, left or "the start",
                _gib(ended.used), _gib(began.used), _gib(began.free), _listed(self._held),
            )  # fmt: skip

    def begin_again(self) -> None:
        """Leave the devices to a critic that may start or load. Its sleep state is unknown; the next lease wakes it."""
        if not self._in_turns:
            return
        self._phase = ""
        self._ranks.everyone(lambda: self._sleep(SCORE))

    def _sleep(self, phase: str) -> None:
        if phase != SCORE and self._critic is not None:
            self._critic.hold()
            if self._ranks.is_first:
                self._held["critic server"] = self._critic.sleep()
        if phase != GENERATE:
            self._held |= self._queue.sleep()
        if phase != TRAIN:
            self._engine.offload()
        give_back(self._engine.device)
        self._held["trainer"] = held_bytes()

    def _wake(self, phase: str) -> None:
        if phase == GENERATE:
            self._queue.wake()
        elif phase == TRAIN:
            self._engine.reload()
        else:
            self._engine.offload(keep_weights=True)
            if self._critic is not None and self._ranks.is_first:
                self._held["critic server"] = self._critic.wake()

    def clock_metrics(self) -> dict[str, float]:
        """`placement/*` since the last call: seconds of handovers, GiB freed by sleeping components, and the most GiB in use at
        the end of a turn."""
        if not self._in_turns:
            return {}
        found = {
            "placement/handover_seconds": self._seconds,
            "placement/moved_gib": self._moved / GIB,
            "placement/peak_gib": self._peak / GIB,
        }
        self._seconds, self._moved, self._peak = 0.0, 0, 0
        return found


def _listed(held: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_gib(size)}" for name, size in held.items())


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
