"""Critic checkpoints: save, commit and restore, under the locks that they need."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_style_rlhf.checkpoint.data import NOT_DATA
from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.critic_service.compute_lock import ComputeLock
from nemo_style_rlhf.critic_service.ledger import Ledger
from nemo_style_rlhf.critic_service.service import Tensors, response
from nemo_style_rlhf.critic_service.store import CriticCheckpointStore
from nemo_style_rlhf.critic_service.worker import (
    BeginFiles,
    CriticWorker,
    EndFiles,
    Export,
    LoadCheckpoint,
    TakeSnapshot,
)
from nemo_style_rlhf.engine.files import unreadable_files
from nemo_style_rlhf.wire import messages
from nemo_style_rlhf.wire.messages import Array, Code, ProtocolError
from nemo_style_rlhf.wire.reading import read


class Checkpoints:
    """The endpoints that concern checkpoints."""

    def __init__(
        self, worker: CriticWorker, store: CriticCheckpointStore, ledger: Ledger, compute_lock: ComputeLock
    ) -> None:
        self._worker = worker
        self._group = worker.group
        self._store = store
        self._ledger = ledger
        self._compute_lock = compute_lock
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._last_save: tuple[protocol.SaveRequest, Future[dict[str, Any]]] | None = None

    def save(self, inputs: Mapping[str, Array]) -> Tensors:
        """Save a checkpoint. Only the copy holds the models: other calls are answered while it is written."""
        request = read(inputs[messages.REQUEST.name], protocol.SaveRequest)
        self._ledger.check_run(request.lease, request.checkpoint_id)
        last = self._last_save
        if not request.copy_only and last is not None and last[0] == request:
            return response(last[1].result())  # also if the server is told to stop meanwhile
        step, answer = self._copied(request)
        return response({"critic_step": step} if request.copy_only else answer.result())

    def _copied(self, request: protocol.SaveRequest) -> "tuple[int, Future[dict[str, Any]]]":
        """Return the copied step, and a future of the answer. The checkpoints are held until the step is written."""
        with ExitStack() as until_written:
            until_written.enter_context(self._compute_lock.checkpoints())
            with self._leased(request, "save"):
                step = self._ledger.step if request.critic_step is None else request.critic_step
                key = replace(request, critic_step=step, copy_only=False)
                last = self._last_save
                if last is not None and last[0] == key and last[1].exception() is None:
                    return step, last[1]
                if step != self._ledger.step:
                    raise ProtocolError(
                        Code.CONFLICT, f"step {step} is to be saved but the critic is at step {self._ledger.step}"
                    )
                exported = {}
                if request.export:
                    export = self._store.export(request.checkpoint_id, lambda folder: self._group.run(Export(folder)))
                    exported["export"] = str(export)
                self._group.run(TakeSnapshot())
            answer = self._saver.submit(self._written, request.checkpoint_id, step, exported)
            self._last_save = key, answer
            held = until_written.pop_all()
            answer.add_done_callback(lambda _: held.close())
            return step, answer

    def _written(self, checkpoint_id: str, step: int, exported: dict[str, Any]) -> dict[str, Any]:
        files = self._store.save(checkpoint_id, step, self._write).digests
        return {"critic_step": step, "files": files, **exported}

    def _write(self, directory: Path) -> None:
        with self._compute_lock.model_lock:
            self._group.run(BeginFiles(directory))
        self._worker.wait_for_files()
        with self._compute_lock.model_lock:
            failures = self._group.run_each([EndFiles()] * self._group.size)
            if error := next(filter(None, failures), None):
                raise error

    def commit(self, request: protocol.CommitRequest) -> dict[str, Any]:
        with self._compute_lock.checkpoints(), self._leased(request, "commit"):
            pruned = self._store.commit(request.checkpoint_id, request.keep)
            if self._last_save is not None and self._last_save[0].checkpoint_id in pruned:
                self._last_save = None
            return {"pruned": pruned}

    def restore(self, request: protocol.RestoreRequest) -> dict[str, Any]:
        with self._compute_lock.checkpoints(), self._leased(request, "restore"):
            directory, record = self._store.verified(request.checkpoint_id, request.digests)
            if unreadable := unreadable_files(directory):  # before anything changes, on any rank
                raise ProtocolError(
                    Code.CONFLICT, f"checkpoint {request.checkpoint_id} is damaged: {unreadable[0]} {NOT_DATA}"
                )
            self._group.run(LoadCheckpoint(directory))
            self._ledger.restored(record.critic_step)
            self._last_save = None
            self._store.commit(request.checkpoint_id, keep=None)  # a manifest names it, so the pair is whole
            return {"critic_step": record.critic_step}

    @contextmanager
    def _leased(
        self, request: protocol.SaveRequest | protocol.CommitRequest | protocol.RestoreRequest, what: str
    ) -> Iterator[None]:
        """Hold the models, asleep or not, and check that the request's lease covers its checkpoint."""
        with self._compute_lock.models(f"{what} of {request.checkpoint_id}", also_asleep=True):
            self._ledger.check_run(request.lease, request.checkpoint_id)
            yield
