"""The critic server: values, training, the lease, and the assembly of its endpoints."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_style_rlhf.checkpoint.starts import log_differences, record_start
from nemo_style_rlhf.critic_service import protocol, validation
from nemo_style_rlhf.critic_service.checkpoints import Checkpoints
from nemo_style_rlhf.critic_service.compute_lock import ComputeLock
from nemo_style_rlhf.critic_service.ledger import Ledger, once
from nemo_style_rlhf.critic_service.protocol import InferRequest, TrainPart
from nemo_style_rlhf.critic_service.reward_server import reward_handler
from nemo_style_rlhf.critic_service.service import Handler, Service, Tensors, response
from nemo_style_rlhf.critic_service.store import REWARD_MODEL, START_WEIGHTS, CriticCheckpointStore
from nemo_style_rlhf.critic_service.worker import Abandoned, CriticWorker, Sleep, Wake
from nemo_style_rlhf.critic_service.worker_group import WorkerGroup
from nemo_style_rlhf.engine.engine import NonFiniteError
from nemo_style_rlhf.engine.memory_use import held_bytes
from nemo_style_rlhf.engine.process_group import init_distributed
from nemo_style_rlhf.launch import malloc
from nemo_style_rlhf.schema.critic import PPOCriticConfig
from nemo_style_rlhf.wire import messages
from nemo_style_rlhf.wire.messages import Array, Code, ProtocolError
from nemo_style_rlhf.wire.reading import read


class Critic:
    """The endpoints that concern the critic in memory."""

    def __init__(
        self, worker: CriticWorker, ledger: Ledger, limits: protocol.Limits, compute_lock: ComputeLock
    ) -> None:
        self._worker = worker
        self._ledger = ledger
        self._limits = limits
        self._compute_lock = compute_lock

    def infer(self, inputs: Mapping[str, Array]) -> Tensors:
        request, wanted = validation.read_infer(inputs, self._limits)
        expected = wanted.expect_critic_step
        if wanted.rewards and self._worker.reward is None:
            raise ProtocolError(
                Code.INVALID, f"request.want is {wanted.want} but this server has no reward model: ask for values"
            )
        if wanted.values and not self._worker.has_critic:
            raise ProtocolError(
                Code.INVALID, f"request.want is {wanted.want} but this server has no critic: ask for rewards"
            )
        with self._compute_lock.models(f"infer of {len(request.lengths)} sequences"):
            if expected not in (None, self._ledger.step):
                raise ProtocolError(
                    Code.CONFLICT,
                    f"request.expect_critic_step is {expected} but the critic is at step {self._ledger.step}",
                )
            answer = {protocol.CRITIC_STEP.name: np.array([self._ledger.step], dtype=np.int64)}
            if wanted.values:
                answer[protocol.VALUES.name] = self._worker.values(request)
            if wanted.rewards and self._worker.reward is not None:
                answer[protocol.REWARDS.name] = self._worker.reward.rewards(request)
        return answer

    def train(self, inputs: Mapping[str, Array]) -> Tensors:
        part = validation.read_train(inputs, self._limits)
        with self._compute_lock.models(f"train step {part.step}, part {part.part} of {part.parts}"):
            answer, parts = self._ledger.stage(part)
            if parts is not None:
                answer = self._apply(parts)
        return response(answer)

    def _apply(self, parts: list[TrainPart]) -> dict[str, Any]:
        """Train on a complete step. A refused step changes no weights, and an invalid one drops its staged parts."""
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
            validation.check_plan(plan, messages.unragged(mask, lengths))
        except ProtocolError:
            self._ledger.drop()
            raise
        try:
            metrics = self._worker.train(InferRequest(tokens, lengths), returns, old_values, mask, plan, step)
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

    def acquire(self, request: protocol.AcquireRequest) -> dict[str, Any]:
        served = self._worker.identity.tokenizer_digest
        if request.tokenizer_digest != served:
            raise ProtocolError(
                Code.CONFLICT,
                f"tokenizer_digest is {request.tokenizer_digest[:16]}, the served model's is {served[:16]}: "
                "policy and reward model need the same tokenizer",
            )
        self._compute_lock.require_open()
        lease = self._ledger.acquire(request.run_id)  # at once, so that work queued under the old lease is refused
        # Work that runs under it is finished first.
        with (
            self._compute_lock.checkpoints(),
            self._compute_lock.models(f"acquire by {request.run_id}", also_asleep=True),
        ):
            malloc.trim()  # the staged parts are gone, and may have been large
            self._turn(asleep=False)  # the new holder may not use time sharing
            return {"lease": lease, "boot_id": self._compute_lock.boot_id, "critic_step": self._ledger.step}

    def sleep(self, request: protocol.TurnRequest) -> dict[str, Any]:
        """Free the devices, for another part of the run."""
        with self._compute_lock.models("sleep", also_asleep=True):
            self._ledger.check(request.lease)
            return {"held_bytes": self._turn(asleep=True)}

    def wake(self, request: protocol.TurnRequest) -> dict[str, Any]:
        with self._compute_lock.models("wake", also_asleep=True):
            self._ledger.check(request.lease)
            return {"held_bytes": self._turn(asleep=False)}

    def _turn(self, *, asleep: bool) -> int:
        """Sleep or wake, unless the models already do. Return the bytes that this process then holds."""
        if asleep == self._compute_lock.asleep:
            return held_bytes()
        held = self._worker.group.run(Sleep() if asleep else Wake())
        self._compute_lock.asleep = asleep
        return held

    def shutdown(self, inputs: Mapping[str, Array]) -> Tensors:
        request = read(inputs[messages.REQUEST.name], protocol.ShutdownRequest)
        self._ledger.check(request.lease)
        self._compute_lock.shutdown_requested.set()
        return response({"stopping": True})


def load_critic_server(config: PPOCriticConfig, device: torch.device, output_dir: Path) -> Service | WorkerGroup:
    """Load the critic's service, or on ranks after the first the group that they follow. Checkpoints go below ``output_dir``.

    Raises:
        UserError: a checkpoint is missing or unsuitable.
    """
    if os.environ.get("RANK", "0") == "0":
        log_differences(output_dir, config)
    init_distributed(device)
    compute_lock = ComputeLock()
    worker = CriticWorker(config, device, should_stop=compute_lock.abandoning.is_set)
    if not config.run.dry_run:  # a dry run has a folder per rank
        worker.group.require_shared(output_dir)
    if not worker.group.is_first:
        return worker.group
    if not worker.has_critic:
        record_start(output_dir, config, after="step_000000")
        return _composed(config, worker, None, compute_lock)
    described = {
        "model.dtype": config.model.dtype,
        "model.lora.rank": config.model.lora.rank,
        "model.lora.alpha": config.model.lora.alpha,
        "reward_model.normalize_rewards": config.reward_model.normalize_rewards,  # its values are on the rewards' scale
        "trained parameters": worker.trained,
        **({} if worker.reward is None else {REWARD_MODEL: worker.identity.model_digest}),
        START_WEIGHTS: worker.start_digest,
    }
    store = CriticCheckpointStore(output_dir, described)
    record_start(output_dir, config, after=store.last_committed or "step_000000")
    return _composed(config, worker, store, compute_lock)


def _composed(
    config: PPOCriticConfig, worker: CriticWorker, store: CriticCheckpointStore | None, compute_lock: ComputeLock
) -> Service:
    """``store`` is None without a critic."""
    ledger = Ledger(max_staged_bytes=config.server.max_staged_bytes)
    limits = worker.identity.limits(config.server.max_request_bytes)
    critic = Critic(worker, ledger, limits, compute_lock)
    handlers: dict[messages.Endpoint, Handler] = {
        protocol.INFER: critic.infer,
        protocol.ACQUIRE: once(protocol.AcquireRequest, critic.acquire),
        protocol.SLEEP: once(protocol.TurnRequest, critic.sleep),
        protocol.WAKE: once(protocol.TurnRequest, critic.wake),
        protocol.SHUTDOWN: critic.shutdown,
    }
    if store is not None:
        checkpoints = Checkpoints(worker, store, ledger, compute_lock)
        handlers |= {
            protocol.TRAIN: critic.train,
            protocol.SAVE: checkpoints.save,
            protocol.COMMIT: once(protocol.CommitRequest, checkpoints.commit),
            protocol.RESTORE: once(protocol.RestoreRequest, checkpoints.restore),
        }
    if worker.reward is not None:
        handlers[protocol.REWARD_INFER] = reward_handler(worker.reward, limits, compute_lock)
    return Service(
        worker.identity,
        limits,
        config.roles,
        handlers,
        compute_lock,
        extended=lambda status: replace(
            status,
            max_staged_bytes=0 if store is None else ledger.max_staged_bytes,
            critic_step=ledger.step,
            last_committed=None if store is None else store.last_committed,
            lease_holder=ledger.holder,
            ranks=worker.group.size,
        ),
        dismiss=worker.group.dismiss,
    )
