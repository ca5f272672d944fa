"""Progress of a run and its interruptions: checkpoints, orders to stop, lost servers."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from nemo_style_rlhf.checkpoint.store import AHEAD, CheckpointStore
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch import interrupt
from nemo_style_rlhf.launch.preemption import request_stop, stop_requested
from nemo_style_rlhf.ppo.parts import Parts
from nemo_style_rlhf.ppo.recovery import Recovery
from nemo_style_rlhf.ppo.saving import Saver
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.placement import TRAIN
from nemo_style_rlhf.wire.connection import ServerRestarted, ServerUnreachable

log = logging.getLogger(__name__)
RECOVERY_PAUSE_S = 1.0
MAX_RECOVERIES = 10
"""Recoveries in a row without a finished step, after which the run ends: the cause will not go away by itself."""


@dataclass
class Progress:
    """Progress of the run. Saved in every checkpoint."""

    step: int = 0
    """Number of finished PPO steps."""
    data_position: int = 0
    """Number of prompts taken from the sampler."""
    critic_step: int = 0
    """Number of train steps that the critic has done."""
    collector: dict[str, Any] = field(default_factory=dict)
    """Fields of :class:`ShapingState`: KL coefficient and running reward statistics."""
    best_reward: float | None = None
    """Highest mean validation reward, if checkpoint.keep_best is on."""
    health: dict[str, Any] = field(default_factory=dict)
    """Fields of :class:`Health`; empty before the first step."""


class RunSession:
    """One start of a run, from its last checkpoint. Every rank makes the same calls."""

    def __init__(
        self, config: PPOActorConfig, parts: Parts, store: CheckpointStore, saver: Saver, recovery: Recovery, *,
        total_steps: int,
    ) -> None:  # fmt: skip
        self._config, self._parts, self._ranks = config, parts, parts.ranks
        self._store, self._saver, self._recovery = store, saver, recovery
        self.total_steps = total_steps
        self.progress = Progress()
        self.restored = False
        """True if actor and critic are in the state that ``progress`` describes."""
        self.stopped = False
        """True if the run was told to end and has committed the step that was under way."""
        self.over: str | None = None
        """Reason why no step is left to train although the last one is not reached."""
        self.save_stall = 0.0
        """Seconds for which the last checkpoint held up training."""
        self._begun = False
        self._lost = self._furthest = 0
        self._cause: Exception | None = None

    @property
    def goes_on(self) -> bool:
        unfinished = self.over is None and self.progress.step < self.total_steps
        return not self.stopped and (unfinished or not self.restored)

    @contextmanager
    def surviving(self) -> Iterator[None]:
        """Context for all calls to the server. If the server is lost within it, call :meth:`restore` next.

        Raises:
            UserError: the server was lost too often.
        """
        try:
            yield
        except (ServerRestarted, ServerUnreachable) as event:
            self._lost += 1
            self._cause = event if self.restored else self._cause  # a loss during the restore is not the cause
            if self._lost > MAX_RECOVERIES:
                raise UserError(
                    f"the critic server was lost {self._lost} times before step {self._furthest + 1} finished. "
                    f"Last error: {event}"
                ) from event
            log.warning("%s; both processes go back to their last common checkpoint", event)
            self.restored = self.stopped = False
            sleep(RECOVERY_PAUSE_S)  # a server that is stopping still answers for its status

    def restore(self, begin: Callable[[Path], None]) -> None:
        """Bring actor and critic to the last common checkpoint. A run without one is new, and commits its step 0.

        Args:
            begin: called with the folder of the checkpoint's data of later steps, once weights and ``progress`` are in place and
                before a new run commits them.

        Raises:
            Preempted: the run was told to end while no server answered.
        """
        self._parts.queue.abandon()
        self._saver.abandon(at=self.progress.step)
        self._parts.residency.begin_again()
        manifest = self._recovery.restore_critic(self._cause)
        self._parts.residency.enter(TRAIN)
        if manifest is None:
            begin(self._store.part(0, AHEAD))
            self._commit()
            self._saver.settle()  # until it is complete, a step would have no checkpoint to go back to
        else:
            self._store.resume_from(manifest.step)
            self._saver.load(self._parts.engine, manifest.step)
            self.progress = Progress(**manifest.state)
            begin(self._store.part(manifest.step, AHEAD))
            log.info("resumed from step %d", self.progress.step)
        self.restored = True
        if not self._begun:
            self._heed_interrupts()
        self._begun = True

    def end_step(self) -> None:
        """Commit the finished step if a checkpoint is due, and heed orders to stop.

        SIGUSR1 (launch/preemption.py) ends the run after it has committed the step under way; during the last step it is
        ignored. With checkpoint.save_on_interrupt the first Ctrl-C does the same.
        """
        # The order may not have reached every rank yet.
        told = self._ranks.all_gather((stop_requested(), self._saver.failed))
        stop, save_failed = map(any, zip(*told, strict=True))
        if save_failed:
            self._saver.settle(at=self.progress.step)
        step, is_last = self.progress.step, self.progress.step == self.total_steps
        self.stopped = stop and not is_last
        if self.stopped or is_last or self._saver.owed or self._config.checkpoint.is_due(step):
            self._commit()
        if self.stopped or is_last:
            self._saver.settle()
        if step > self._furthest:
            self._lost, self._furthest = 0, step

    def end_here(self, why: str) -> None:
        """Commit the last finished step as the run's last."""
        self.over = why
        if self.progress.step not in self._store.committed_steps() or self._config.checkpoint.export_critic:
            self._commit()
        self._saver.settle()

    def undo(self) -> None:
        """Return the critic server and its folder to the state in which this run found them (dry runs)."""
        self._recovery.undo()

    def _commit(self) -> None:
        self._parts.residency.enter(TRAIN)
        step, began = self.progress.step, perf_counter()
        self._saver.save(
            self._parts.engine,
            step,
            asdict(self.progress),
            ahead=self._parts.queue.prefetched(step),
            critic_step=self.progress.critic_step,
            export_critic=self._config.checkpoint.export_critic and (step == self.total_steps or self.over is not None),
        )
        self.save_stall = perf_counter() - began

    def _heed_interrupts(self) -> None:
        if self._config.run.dry_run:  # nothing resumes from a dry run
            return
        interrupt.describe(self._standing)
        if self._config.checkpoint.save_on_interrupt:
            interrupt.on_first(self._stop_after_step)

    def _standing(self) -> str:
        committed, step = self._store.committed_steps(), self.progress.step
        where = "in the export" if step == self.total_steps or self.over else f"in step {step + 1}"
        saved = f"step {committed[-1]} is saved" if committed and committed[-1] else "no step is saved yet"
        return f"stopped {where}; {saved}; the same command goes on"

    def _stop_after_step(self) -> None:
        if self._ranks.is_first:
            log.info(
                "the run ends after step %d, with a checkpoint; Ctrl-C again ends it at once", self.progress.step + 1
            )
        request_stop()
