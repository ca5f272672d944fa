"""Brings actor and critic to the same checkpoint: when a run starts, and whenever the server was lost."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from nemo_style_rlhf.checkpoint.names import checkpoint_id
from nemo_style_rlhf.checkpoint.store import CheckpointStore, Manifest
from nemo_style_rlhf.critic_service.protocol import Status
from nemo_style_rlhf.critic_service.remote_critic import RemoteCritic
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch.preemption import Preempted, stop_requested
from nemo_style_rlhf.wire.connection import ServerAbsent
from nemo_style_rlhf.wire.messages import Code, ProtocolError

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


@dataclass
class Recovery:
    """Every rank makes the same calls; only the first changes the server."""

    critic: RemoteCritic | None
    store: CheckpointStore
    ranks: Ranks
    run_id: str
    output_dir: Path
    restores: bool = True
    """True if the server's critic belongs to the run's checkpoints; a reward model does not change."""

    def restore_critic(self, cause: Exception | None = None) -> Manifest | None:
        """Take the server's lease. If the run has a critic, make the server restore the critic checkpoint of the newest usable
        checkpoint.

        Args:
            cause: the error by which the last server was lost.

        Returns:
            The newest usable checkpoint; None for a new run.

        Raises:
            UserError: no server appeared, no checkpoint can be restored, or the server has trained for another run.
            Preempted: the run was told to end while no server answered.
        """
        critic = self.critic
        if critic is None:
            return self.ranks.on_first(self.store.latest)
        critic.forget_queued()
        status = self._wait(critic, cause)
        manifest = self.ranks.on_first(lambda: self._restore_critic(critic, status))
        self.ranks.everyone(lambda: None if self.ranks.is_first else critic.shake_hands_again())  # new process
        return manifest

    def clear_device(self) -> None:
        """Make the critic leave its device before other parts of the run take it; :meth:`restore_critic` wakes it."""
        critic = self.critic
        if critic is not None:
            self.ranks.on_first(lambda: (self._acquired(critic, critic.status()), critic.sleep()))

    def _wait(self, critic: RemoteCritic, cause: Exception | None) -> Status:
        try:
            return wait_together(self.ranks, self.store, partial(critic.wait_until_ready, log.info))
        except ServerAbsent as error:
            if cause is None:
                raise
            raise ServerAbsent(f"{error}; it was lost with: {cause}") from error

    def _restore_critic(self, critic: RemoteCritic, status: Status) -> Manifest | None:
        found = self._acquired(critic, status)
        manifest = restore_newest(critic, self.store) if self.restores else self.store.latest()
        if manifest is None:
            self._require_untouched(found)
        return manifest

    def _acquired(self, critic: RemoteCritic, status: Status) -> int:
        """Take the lease; returns the critic's step."""
        if not self.store.committed_steps():  # before this run takes the lease: it may belong to another run
            self._require_untouched(status.critic_step)
        if status.lease_holder not in (None, self.run_id):
            log.warning("the critic server belonged to the run %s, which ends if it still trains", status.lease_holder)
        return critic.acquire(self.run_id)

    def _require_untouched(self, critic_step: int) -> None:
        if critic_step != 0:
            raise UserError(
                f"the critic server has already trained {critic_step} steps but {self.output_dir} holds no checkpoint to resume "
                "from: restart the server, or give the run.output_dir of the run it belongs to"
            )

    def undo(self) -> None:
        """Return the server to the state in which this run found it, and remove the run's files there."""
        critic = self.critic if self.restores else None
        if critic is not None and self.ranks.is_first and (committed := self.store.committed_steps()):
            critic.restore(checkpoint_id(self.run_id, committed[0]), None)
            critic.commit(checkpoint_id(self.run_id, committed[0]), keep=0)


def wait_together(ranks: Ranks, store: CheckpointStore, wait: Callable[[Callable[[], None]], Answer]) -> Answer:
    """Make every rank wait for a server, so that any of them may be told to end.

    Args:
        wait: waits, and calls its argument again and again while no server answers.

    Returns:
        The result of ``wait`` on the first rank.

    Raises:
        Preempted: the run was told to end. No step can finish without a server, so it loses nothing that a later start would
            still have.
    """
    told = ranks.flag()

    def heed() -> None:
        if told.raised(stop_requested()):
            raise Preempted

    try:
        return ranks.everyone(lambda: wait(heed))[0]
    except Preempted:
        committed = store.committed_steps()
        saved = f"step {committed[-1]} is committed" if committed else "nothing is lost"
        log.info("told to end while no server answers; %s, the same command goes on", saved)
        ranks.barrier()  # launchers may kill every rank as soon as one exits
        raise


def restore_newest(critic: RemoteCritic, store: CheckpointStore) -> Manifest | None:
    """Make the server restore the newest checkpoint whose actor checkpoint and critic checkpoint are both undamaged.

    Raises:
        UserError: the run has checkpoints, but none that actor and critic can both restore.
    """
    refusal: ProtocolError | None = None
    for manifest in store.undamaged():
        name = checkpoint_id(manifest.run_id, manifest.step)
        require_critic_checkpoint(manifest)
        try:
            restored, expected = critic.restore(name, manifest.critic["files"]), manifest.critic["critic_step"]
            if restored != expected:
                raise ProtocolError(Code.CONFLICT, f"{name} holds the critic's step {restored}, not {expected}")
            return manifest
        except ProtocolError as error:
            if error.code not in (Code.CONFLICT, Code.NOT_FOUND):
                raise
            log.warning("%s: falling back to the checkpoint before it", error.message)
            refusal = refusal or error
    if refusal is not None:
        raise UserError(f"no checkpoint can be restored: {refusal.message}") from refusal
    return store.latest()


def require_critic_checkpoint(manifest: Manifest) -> None:
    """Raise UserError if the manifest names no critic checkpoint; a run with a critic server needs one."""
    if not manifest.critic:
        raise UserError(
            f"checkpoint step_{manifest.step:06d} is of a run without a critic server: resume it without one, or choose "
            "another run.output_dir"
        )
