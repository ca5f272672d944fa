"""What a request to the critic process does."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from nemo_style_rlhf.checkpoint.data import NOT_DATA
from nemo_style_rlhf.checkpoint.starts import log_differences, record_start
from nemo_style_rlhf.critic_service import protocol, validation
from nemo_style_rlhf.critic_service.base import Service, Tensors
from nemo_style_rlhf.critic_service.ledger import Ledger
from nemo_style_rlhf.critic_service.protocol import Array, Code, InferRequest, ProtocolError, TrainPart
from nemo_style_rlhf.critic_service.reward_model import Score
from nemo_style_rlhf.critic_service.store import HalfStore
from nemo_style_rlhf.critic_service.worker import (
    Abandoned,
    BeginFiles,
    CriticWorker,
    EndFiles,
    Export,
    Infer,
    Load,
    TakeSnapshot,
    Train,
)
from nemo_style_rlhf.critic_service.worker_group import WorkerGroup
from nemo_style_rlhf.engine.engine import NonFiniteError
from nemo_style_rlhf.engine.files import unreadable_files
from nemo_style_rlhf.launch import bootstrap, malloc
from nemo_style_rlhf.schema.critic import PPOCriticConfig

Changing = TypeVar("Changing", protocol.AcquireRequest, protocol.CommitRequest, protocol.RestoreRequest)
REMEMBERED = 100
"""Answers that each of these endpoints can give again."""


class CriticService(Service):
    """The endpoints of the critic process."""

    def __init__(
        self, worker: CriticWorker, store: HalfStore, *, max_request_bytes: int, max_staged_bytes: int
    ) -> None:
        super().__init__(worker.identity, worker.reward, worker.group, max_request_bytes=max_request_bytes)
        self._worker = worker
        self._store = store
        self._ledger = Ledger(max_staged_bytes=max_staged_bytes)
        self._storing = threading.Lock()  # one save, commit or restore at a time; taken before the models'
        self._working.insert(0, self._storing)
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._last_save: tuple[protocol.SaveRequest, Future[dict[str, Any]]] | None = None
        self.dismiss = worker.group.dismiss
        self.roles.insert(0, "critic")
        self._handlers |= {
            protocol.INFER.name: self._infer,
            protocol.TRAIN.name: self._train,
            protocol.SAVE.name: self._save,
            protocol.COMMIT.name: self._once(protocol.CommitRequest, self._commit),
            protocol.RESTORE.name: self._once(protocol.RestoreRequest, self._restore),
            protocol.ACQUIRE.name: self._once(protocol.AcquireRequest, self._acquire),
            protocol.SHUTDOWN.name: self._shutdown,
        }

    def status(self) -> protocol.Status:
        return replace(
            super().status(),
            max_staged_bytes=self._ledger.max_staged_bytes,
            critic_step=self._ledger.step,
            last_committed=self._store.last_committed,
            lease_holder=self._ledger.holder,
        )

    # --- endpoints ----------------------------------------------------------------------------------------------------

    def _infer(self, inputs: Mapping[str, Array]) -> Tensors:
        request = validation.read_infer(inputs, self._limits)
        with self._models(f"infer of {len(request.lengths)} sequences"):
            step = np.array([self._ledger.step], dtype=np.int64)
            answer = {protocol.VALUES.name: self._group.run(Infer(request)), protocol.CRITIC_STEP.name: step}
            if self._worker.reward is not None:
                answer[protocol.REWARDS.name] = self._group.run(Score(request))
        return answer

    def _train(self, inputs: Mapping[str, Array]) -> Tensors:
        part = validation.read_train(inputs, self._limits)
        with self._models(f"train step {part.step}, part {part.part} of {part.parts}"):
            answer, parts = self._ledger.stage(part)
            if parts is not None:
                answer = self._apply(parts)
        return _json(answer)

    def _apply(self, parts: list[TrainPart]) -> dict[str, Any]:
        """Train on a complete step; a step that is refused leaves neither weights nor staged parts changed."""
        step, plan = parts[0].step, parts[-1].plan
        assert plan is not None  # read_train: the last part has one
        tokens, lengths, returns, old_values, mask = (
            np.concatenate(arrays) for arrays in zip(*(p.arrays() for p in parts))
        )
        try:
            if plan.digest != protocol.train_digest([p.arrays() for p in parts], plan.mini_batches, plan.normalizers):
                raise ProtocolError(
                    Code.INVALID,
                    f"plan.digest does not fit the {len(parts)} parts of step {step}: send all of them again",
                )
            validation.check_plan(plan, protocol.unragged(mask, lengths))
        except ProtocolError:
            self._ledger.drop()
            raise
        try:
            metrics = self._group.run(Train(InferRequest(tokens, lengths), returns, old_values, mask, plan, step))
        except NonFiniteError as error:
            raise ProtocolError(
                Code.NON_FINITE,
                f"train step {step} failed because {error}; the server ends, restart it and resume from the last checkpoint",
            ) from error
        except Abandoned as error:
            raise ProtocolError(Code.STOPPING, f"train step {step} was abandoned because the server stops") from error
        answer = {"critic_step": step, "metrics": metrics}
        self._ledger.applied(parts, answer)
        return answer

    def _once(
        self, message: type[Changing], change: Callable[[Changing], dict[str, Any]]
    ) -> Callable[[Mapping[str, Array]], Tensors]:
        """An endpoint for which a request that it has answered, however late a copy of it comes, changes nothing.

        Triton hands an endpoint one request at a time.
        """
        answered: dict[str, tuple[Changing, dict[str, Any]]] = {}

        def endpoint(inputs: Mapping[str, Array]) -> Tensors:
            request = validation.read_json(inputs[protocol.REQUEST.name], message)
            if request.request_id is None:
                return _json(change(request))
            if request.request_id not in answered:
                answered[request.request_id] = request, change(request)
                if len(answered) > REMEMBERED:
                    del answered[next(iter(answered))]
            first, answer = answered[request.request_id]
            if first != request:
                raise ProtocolError(
                    Code.CONFLICT, f"request_id {request.request_id} was used before, with other content"
                )
            return _json(answer)

        return endpoint

    def _acquire(self, request: protocol.AcquireRequest) -> dict[str, Any]:
        served = self._identity.tokenizer_digest
        if request.tokenizer_digest != served:
            raise ProtocolError(
                Code.CONFLICT,
                f"tokenizer_digest is {request.tokenizer_digest[:16]}, the served model's is {served[:16]}: "
                "policy and reward model need the same tokenizer",
            )
        self._require_open()
        lease = self._ledger.acquire(request.run_id)  # at once, so that work queued under the old lease is refused
        with self._stored(), self._models(f"acquire by {request.run_id}"):  # work running under it is finished first
            malloc.trim()  # what was staged is gone, and may be much
            return {"lease": lease, "boot_id": self.boot_id, "critic_step": self._ledger.step}

    def _save(self, inputs: Mapping[str, Array]) -> Tensors:
        """Only the copy holds the models: others are answered while it is written."""
        request = validation.read_json(inputs[protocol.REQUEST.name], protocol.SaveRequest)
        self._ledger.check_run(request.lease, request.checkpoint_id)
        last = self._last_save
        if not request.copy_only and last is not None and last[0] == request:
            return _json(last[1].result())  # also of a server that is told to stop meanwhile
        step, answer = self._copied(request)
        return _json({"critic_step": step} if request.copy_only else answer.result())

    def _copied(self, request: protocol.SaveRequest) -> "tuple[int, Future[dict[str, Any]]]":
        """The step that is copied, and the answer to come once it is written; the checkpoints are held until then."""
        with ExitStack() as until_written:
            until_written.enter_context(self._stored())
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
        files = self._store.save(checkpoint_id, step, self._write_half).digests
        return {"critic_step": step, "files": files, **exported}

    def _write_half(self, directory: Path) -> None:
        with self._model_lock:
            self._group.run(BeginFiles(directory))
        self._worker.wait_for_files()
        with self._model_lock:
            if error := self._group.run(EndFiles()):
                raise error

    def _commit(self, request: protocol.CommitRequest) -> dict[str, Any]:
        with self._stored(), self._leased(request, "commit"):
            pruned = self._store.commit(request.checkpoint_id, request.keep)
            if self._last_save is not None and self._last_save[0].checkpoint_id in pruned:
                self._last_save = None
            return {"pruned": pruned}

    def _restore(self, request: protocol.RestoreRequest) -> dict[str, Any]:
        with self._stored(), self._leased(request, "restore"):
            directory, half = self._store.verified(request.checkpoint_id, request.digests)
            if unreadable := unreadable_files(directory):  # before anything changes, on any rank
                raise ProtocolError(
                    Code.CONFLICT, f"checkpoint {request.checkpoint_id} is damaged: {unreadable[0]} {NOT_DATA}"
                )
            self._group.run(Load(directory))
            self._ledger.restored(half.critic_step)
            self._last_save = None
            self._store.commit(request.checkpoint_id, keep=None)  # a manifest names it, so the pair is whole
            return {"critic_step": half.critic_step}

    def _shutdown(self, inputs: Mapping[str, Array]) -> Tensors:
        request = validation.read_json(inputs[protocol.REQUEST.name], protocol.ShutdownRequest)
        self._ledger.check(request.lease)
        self.shutdown_requested.set()
        return _json({"stopping": True})

    @contextmanager
    def _stored(self) -> Iterator[None]:
        """Hold the checkpoints; refused once the server is stopping."""
        self._require_open()
        with self._storing:
            yield

    @contextmanager
    def _leased(
        self, request: protocol.SaveRequest | protocol.CommitRequest | protocol.RestoreRequest, what: str
    ) -> Iterator[None]:
        """Hold the models for what the request's lease may do to its checkpoint."""
        with self._models(f"{what} of {request.checkpoint_id}"):
            self._ledger.check_run(request.lease, request.checkpoint_id)
            yield


def load_critic_service(config: PPOCriticConfig, device: torch.device, output_dir: Path) -> CriticService | WorkerGroup:
    """The critic process's service, which on other ranks than the first is to follow that; checkpoints go below ``output_dir``.

    Raises:
        UserError: the checkpoint is missing or is no reward model with one label.
    """
    if os.environ.get("RANK", "0") == "0":
        log_differences(output_dir, config)
    bootstrap.init_distributed(device)
    abandoning = threading.Event()
    worker = CriticWorker(config, device, should_stop=abandoning.is_set)
    if not config.run.dry_run:  # whose folders are each rank's own
        worker.group.require_shared(output_dir)
    if not worker.group.is_first:
        return worker.group
    described = {
        "model.dtype": config.model.dtype,
        "model.lora.rank": config.model.lora.rank,
        "model.lora.alpha": config.model.lora.alpha,
        "critic.normalize_rewards": config.critic.normalize_rewards,  # its values are on the rewards' scale
        "trained parameters": worker.trained,
        "reward model": worker.identity.model_digest,
    }
    store = HalfStore(output_dir, described)
    record_start(output_dir, config, after=store.last_committed or "step_000000")
    service = CriticService(
        worker,
        store,
        max_request_bytes=config.server.max_request_bytes,
        max_staged_bytes=config.critic.max_staged_bytes,
    )
    service.abandon = abandoning.set
    return service


def _json(answer: Mapping[str, Any]) -> Tensors:
    return {protocol.RESPONSE.name: protocol.json_tensor(answer)}
