"""What a request does. No network: :meth:`CriticService.handle` takes named arrays and returns named arrays."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from nemo_style_rlhf.critic_service import protocol, validation
from nemo_style_rlhf.critic_service.ledger import Ledger
from nemo_style_rlhf.critic_service.protocol import Array, Code, InferRequest, ProtocolError, TrainPart
from nemo_style_rlhf.critic_service.store import HalfStore
from nemo_style_rlhf.critic_service.worker import Abandoned, CriticWorker
from nemo_style_rlhf.engine.engine import NonFiniteError

Tensors = dict[str, Array]


class CriticService:
    """The endpoints of the critic process. :meth:`handle` may be called from many threads.

    One lock serialises everything that touches the models; ``critic_status`` does not need it.
    """

    def __init__(self, worker: CriticWorker, store: HalfStore, *, max_request_bytes: int) -> None:
        self.boot_id = secrets.token_hex(8)
        self.shutdown_requested = threading.Event()
        self._refusing = threading.Event()
        self._abandoning = threading.Event()
        self._worker = worker
        self._store = store
        self._ledger = Ledger()
        self._model_lock = threading.Lock()
        self._busy: tuple[str, float] | None = None
        self._last_save: tuple[tuple[protocol.CheckpointRequest, int], dict[str, Any]] | None = None
        self._limits = protocol.Limits(worker.vocab_size, worker.max_length, max_request_bytes)
        self._config_digest = worker.config_digest()
        self._tokenizer_digest = worker.tokenizer_digest()
        self._handlers: dict[str, Callable[[Mapping[str, Array]], Tensors]] = {
            protocol.STATUS.name: self._status,
            protocol.INFER.name: self._infer,
            protocol.TRAIN.name: self._train,
            protocol.SAVE.name: self._save,
            protocol.COMMIT.name: self._commit,
            protocol.RESTORE.name: self._restore,
            protocol.ACQUIRE.name: self._acquire,
            protocol.SHUTDOWN.name: self._shutdown,
            protocol.REWARD_INFER.name: self._reward_infer,
        }

    @property
    def roles(self) -> list[str]:
        return ["critic"] if self._worker.reward_model is None else ["critic", "reward"]

    def handle(self, endpoint: str, inputs: Mapping[str, Array]) -> Tensors:
        """Answer one request.

        Raises:
            ProtocolError: the request was refused and changed nothing.
            Exception: anything else is a fault of this process, which must not go on.
        """
        return self._handlers[endpoint](inputs)

    def status(self) -> protocol.Status:
        busy = self._busy
        return protocol.Status(
            protocol_version=protocol.PROTOCOL_VERSION,
            boot_id=self.boot_id,
            roles=self.roles,
            model_digest=self._worker.model_digest,
            config_digest=self._config_digest,
            tokenizer_digest=self._tokenizer_digest,
            vocab_size=self._limits.vocab_size,
            max_length=self._limits.max_length,
            max_request_bytes=self._limits.max_request_bytes,
            critic_step=self._ledger.step,
            last_committed=self._store.last_committed,
            lease_holder=self._ledger.holder,
            busy=f"{busy[0]} for {time.monotonic() - busy[1]:.1f} s" if busy else None,
        )

    # --- endpoints ----------------------------------------------------------------------------------------------------

    def _status(self, _: Mapping[str, Array]) -> Tensors:
        return {protocol.RESPONSE.name: protocol.bytes_tensor(self.status().to_json())}

    def _infer(self, inputs: Mapping[str, Array]) -> Tensors:
        request = validation.read_infer(inputs, self._limits)
        with self._models(f"infer of {len(request.lengths)} sequences"):
            values, rewards = self._worker.infer(request)
            step = self._ledger.step
        answer = {protocol.VALUES.name: values, protocol.CRITIC_STEP.name: np.array([step], dtype=np.int64)}
        if rewards is not None:
            answer[protocol.REWARDS.name] = rewards
        return answer

    def _reward_infer(self, inputs: Mapping[str, Array]) -> Tensors:
        request = validation.read_reward(inputs, self._limits)
        texts = zip(request.prompts, request.responses, strict=True)
        sequences = [self._worker.reward_text.token_ids(prompt, response) for prompt, response in texts]
        tokenised = validation.read_tokenised(sequences, self._limits)
        with self._models(f"scoring of {len(sequences)} texts"):
            return {protocol.REWARDS.name: self._worker.score(tokenised)}

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
            metrics = self._worker.train(
                InferRequest(tokens, lengths), returns, old_values, mask, plan, should_stop=self._abandoning.is_set
            )
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

    def _acquire(self, inputs: Mapping[str, Array]) -> Tensors:
        request = validation.read_json(inputs[protocol.REQUEST.name], protocol.AcquireRequest)
        if request.tokenizer_digest != self._tokenizer_digest:
            raise ProtocolError(
                Code.CONFLICT,
                f"tokenizer_digest is {request.tokenizer_digest[:16]}, the served model's is {self._tokenizer_digest[:16]}: "
                "policy and reward model need the same tokenizer",
            )
        self._require_open()
        lease = self._ledger.acquire(request.run_id)  # at once, so that work queued under the old lease is refused
        with self._models(f"acquire by {request.run_id}"):  # work running under it is finished first
            return _json({"lease": lease, "boot_id": self.boot_id, "critic_step": self._ledger.step})

    def _save(self, inputs: Mapping[str, Array]) -> Tensors:
        request = validation.read_json(inputs[protocol.REQUEST.name], protocol.CheckpointRequest)
        with self._leased(request.lease, f"save of {request.checkpoint_id}"):
            step = self._ledger.step
            if self._last_save is None or self._last_save[0] != (request, step):
                half = self._store.save(request.checkpoint_id, step, self._worker.save)
                answer: dict[str, Any] = {
                    "critic_step": step,
                    "files": half.digests,
                    "state_digest": self._worker.digest(),
                }
                if request.export:
                    answer["export"] = str(self._store.export(request.checkpoint_id, self._worker.export))
                self._last_save = (request, step), answer
            return _json(self._last_save[1])

    def _commit(self, inputs: Mapping[str, Array]) -> Tensors:
        request = validation.read_json(inputs[protocol.REQUEST.name], protocol.CommitRequest)
        with self._leased(request.lease, f"commit of {request.checkpoint_id}"):
            return _json({"pruned": self._store.commit(request.checkpoint_id, request.keep)})

    def _restore(self, inputs: Mapping[str, Array]) -> Tensors:
        request = validation.read_json(inputs[protocol.REQUEST.name], protocol.CheckpointRequest)
        with self._leased(request.lease, f"restore of {request.checkpoint_id}"):
            directory, half = self._store.verified(request.checkpoint_id, request.digests)
            self._worker.load(directory)
            self._ledger.restored(half.critic_step)
            self._last_save = None
            self._store.commit(request.checkpoint_id, keep=None)  # a manifest names it, so the pair is whole
            return _json({"critic_step": half.critic_step})

    def _shutdown(self, inputs: Mapping[str, Array]) -> Tensors:
        request = validation.read_json(inputs[protocol.REQUEST.name], protocol.ShutdownRequest)
        self._ledger.check(request.lease)
        self.shutdown_requested.set()
        return _json({"stopping": True})

    # --- who may touch the models -------------------------------------------------------------------------------------

    @contextmanager
    def _leased(self, lease: str, what: str) -> Iterator[None]:
        with self._models(what):
            self._ledger.check(lease)
            yield

    @contextmanager
    def _models(self, what: str) -> Iterator[None]:
        """Hold the models; refused once the server is stopping."""
        self._require_open()
        with self._model_lock:
            self._require_open()
            self._busy = what, time.monotonic()
            try:
                yield
            finally:
                self._busy = None

    def _require_open(self) -> None:
        if self._refusing.is_set():
            raise ProtocolError(Code.STOPPING, "the server is stopping")

    def stop(self, grace_s: float) -> bool:
        """Refuse new work and wait for the running call; False when it had to be abandoned after ``grace_s`` seconds."""
        self._refusing.set()
        finished = self._model_lock.acquire(timeout=grace_s)
        self._abandoning.set()
        return finished


def _json(answer: Mapping[str, Any]) -> Tensors:
    return {protocol.RESPONSE.name: protocol.json_tensor(answer)}
