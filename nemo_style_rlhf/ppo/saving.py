"""Checkpoints written while training continues: training waits for the copy in memory, not for the disk.

A full disk does not end the run at once: the steps since the last checkpoint would be lost, and there may be room again
soon. Every other failure ends it.
"""

import json
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from typing import Any

from nemo_style_rlhf.checkpoint.names import checkpoint_id
from nemo_style_rlhf.checkpoint.store import ACTOR, AHEAD, HF, CheckpointStore
from nemo_style_rlhf.critic_service.remote_critic import RemoteCritic
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.engine.snapshot import Snapshot
from nemo_style_rlhf.errors import StorageError
from nemo_style_rlhf.ppo.export import PolicyCopy
from nemo_style_rlhf.rollout.prefetched import Prefetched
from nemo_style_rlhf.schema.actor import CheckpointConfig
from nemo_style_rlhf.tracking.rollouts import RolloutWriter, Work
from nemo_style_rlhf.wire.connection import ServerRestarted, ServerUnreachable

log = logging.getLogger(__name__)
PACKAGES = ("torch", "transformers", "deepspeed", "numpy")
"""Packages whose versions a checkpoint names."""
IDENTITY_FILE = "identity.json"
"""File in the actor checkpoint: settings that a run must share with it to resume from it."""


class Saver:
    """Writes one checkpoint at a time. Every rank makes the same calls; an error on one rank is raised on all."""

    def __init__(
        self, config: CheckpointConfig, store: CheckpointStore, critic: RemoteCritic | None, *, run_id: str,
        identity: dict[str, Any], rollouts: RolloutWriter | None = None, policy: Callable[[], PolicyCopy] | None = None,
    ) -> None:  # fmt: skip
        """``critic`` is the critic whose checkpoints belong to the run's; None if the run trains none.

        Args:
            identity: settings that a run must share with the checkpoints to resume from them.
            policy: copies the policy, for checkpoints that hold it as a Hugging Face directory. Every rank calls it.
        """
        self._config, self._store, self._critic, self._run_id = config, store, critic, run_id
        self._identity, self._rollouts, self._policy = identity, rollouts, policy
        self._failures = 0
        """Failed checkpoints in a row."""
        self._uncommitted: list[str] = []
        """Ids of complete checkpoints that the server has not committed yet."""
        self._ranks = Ranks()  # separate: training's would mix the messages of two threads
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(
        self,
        engine: Engine,
        step: int,
        state: dict[str, Any],
        *,
        ahead: Prefetched,
        critic_step: int,
        export_critic: bool,
    ) -> None:
        """Copy the state after ``step`` to memory and begin to write it. The critic makes its own copy before any train step
        that is requested later.

        Raises:
            Exception: the previous checkpoint failed, see :meth:`settle`.
        """
        self.settle(at=step)
        critic_checkpoint: Future[dict[str, Any]] | None = None
        if self._critic is not None and self._ranks.is_first:
            critic_checkpoint = self._critic.save(
                checkpoint_id(self._run_id, step), critic_step=critic_step, export=export_critic
            )
        rows = None if self._rollouts is None else self._rollouts.writing
        policy = self._policy() if self._policy is not None and step > 0 else None  # at step 0 it is model.path
        self._writing = self._thread.submit(
            self._write, step, engine.snapshot(), state, ahead, critic_checkpoint, rows, policy
        )

    @property
    def failed(self) -> bool:
        """True if the checkpoint under way has failed, as far as this rank knows; :meth:`settle` then raises the error."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    @property
    def owed(self) -> bool:
        """True if :meth:`settle` found that the last checkpoint had failed, and none has begun since."""
        return self._failures > 0 and self._writing is None

    def settle(self, *, at: int | None = None) -> None:
        """Wait until the last checkpoint is written.

        Args:
            at: the last finished step. With it, a checkpoint that the disk refused is only logged, up to the limit.

        Raises:
            StorageError: the disk refused the checkpoint.
            ProtocolError, ServerRestarted, ServerUnreachable: the critic checkpoint failed.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result()
            self._failures = 0
        except StorageError as error:
            self._failures += 1
            limit = self._config.max_failed_saves
            if at is None or self._failures >= limit:
                raise
            if self._ranks.is_first:
                unsaved = at - max(self._store.committed_steps(), default=0)
                log.error(
                    "%s; steps that are not saved: %d; training goes on and saves anew after this step (failure %d, of which "
                    "checkpoint.max_failed_saves=%d in a row end the run)", error, unsaved, self._failures, limit,
                )  # fmt: skip

    def abandon(self, *, at: int) -> None:
        """Like :meth:`settle`, but only log the failure of a checkpoint that was incomplete when the server was lost."""
        try:
            self.settle(at=at)
        except (ServerRestarted, ServerUnreachable) as error:
            log.warning("%s; the last checkpoint is not complete", error)
        self._uncommitted.clear()

    def load(self, engine: Engine, step: int) -> None:
        """Load the actor checkpoint of ``step``."""
        engine.load(self._store.part(step, ACTOR) / "engine")

    def _write(
        self, step: int, copy: Snapshot, state: dict[str, Any], ahead: Prefetched,
        critic_checkpoint: "Future[dict[str, Any]] | None", rows: Work | None, policy: PolicyCopy | None,
    ) -> None:  # fmt: skip
        """Write the critic checkpoint, then the actor's, then the manifest that names both; then both sides prune."""
        folder, whole_or_absent = self._store.part(step, ACTOR), partial(self._store.whole_or_absent, step)

        def begin() -> dict[str, Any]:
            described = {} if critic_checkpoint is None else critic_checkpoint.result()
            with whole_or_absent():
                self._store.begin(step)
            return described

        def commit() -> None:
            with whole_or_absent():
                if rows is not None and self._rollouts is not None:
                    self._rollouts.finish(rows)  # a resumed run does not generate these rollouts again
                ahead.save(self._store.part(step, AHEAD))
                if policy is not None:
                    policy.write(self._store.part(step, HF))
                (folder / IDENTITY_FILE).write_text(json.dumps(self._identity))
                versions = {name: version(name) for name in PACKAGES}
                self._store.commit(step, self._run_id, critic=described, state=state, versions=versions)
            if self._critic is not None:
                self._uncommitted.append(checkpoint_id(self._run_id, step))
                while self._uncommitted:  # more than one if the server's disk refused an earlier commit
                    self._critic.commit(self._uncommitted[0], self._config.keep_last)
                    del self._uncommitted[0]
            self._store.prune(step)

        try:
            described = self._ranks.on_first(begin)
            # It deletes only after every rank has ended: none may still be writing.
            with whole_or_absent(needed=copy.nbytes):
                self._ranks.everyone(lambda: copy.write(folder / "engine"))
            copy.drop()
            self._ranks.on_first(commit)
        finally:
            copy.drop()  # an error's traceback would keep the copy alive
            if policy is not None:
                policy.drop()
            ahead.release()
