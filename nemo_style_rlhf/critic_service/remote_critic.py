"""``RemoteCritic``: the critic process as the actor sees it.

Calls that compute return futures. Every future must be awaited: it raises the call's error.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from time import time
from typing import Any

import numpy as np

from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.critic_service.client import ServerClient, infer_pool, parse_json, split
from nemo_style_rlhf.critic_service.protocol import Status, Want, Wanted
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.remote_critic import RemoteCriticConfig
from nemo_style_rlhf.wire import messages
from nemo_style_rlhf.wire.messages import Array

INFER_BYTES_PER_TOKEN = 4
TRAIN_BYTES_PER_TOKEN = 16
BYTES_PER_SEQUENCE = 4


@dataclass(frozen=True)
class CriticInference:
    """Answers for sequences, in the order they were given."""

    values: list[Array] | None
    """float32 [T] per sequence, indexed by state: values[t] is V after tokens 0..t. None if only rewards were wanted."""
    rewards: Array | None
    """float32 [B]; None if only values were wanted."""
    critic_steps: frozenset[int]
    """Train calls the critic had seen at each request that the sequences were split into. One number, unless the critic was
    trained or restored between them."""


@dataclass(frozen=True)
class CriticTrainBatch:
    """One train step. Lists have one array per sequence; per-token arrays are float32 [T] and indexed by state."""

    sequences: list[Array]
    """int32 [T] token ids, prompt and response."""
    returns: list[Array]
    old_values: list[Array]
    """The values of the rollout, for clipping."""
    masks: list[Array]
    """1 exactly where the action (token t + 1) was produced by the policy; the last entry is 0."""
    mini_batches: list[list[int]]
    """Sequence indices; one optimizer step each, in order."""
    normalizers: list[float] = field(default_factory=list)
    """Divisor of each mini-batch's summed loss; empty takes its count of unmasked tokens."""


class RemoteCritic(ServerClient):
    """Client of one critic server. Among clients that share a server, only the one with the lease changes the critic."""

    def __init__(self, config: RemoteCriticConfig) -> None:
        super().__init__(config)
        self._agreement: dict[str, Any] | None = None
        self.ranks = 1
        """The server's ranks at the last handshake. A request keeps them busy if it has work for all of them."""
        self._lease: str | None = None
        self._max_request_bytes = config.max_request_bytes
        self._max_staged_bytes = 0
        self._inferred: list[tuple[float, float]] = []
        self._turn = InferenceTurn()
        self._train_pool = ThreadPoolExecutor(1, thread_name_prefix="critic-train")
        self._save_pool = ThreadPoolExecutor(1, thread_name_prefix="critic-save")

    # --- handshake ----------------------------------------------------------------------------------------------------

    def handshake(
        self, *, tokenizer_digest: str, vocab_size: int, needs_rewards: bool, needs_critic: bool = True,
        needs_bits: bool = False,
    ) -> Status:  # fmt: skip
        """Check that both processes agree, and remember the server process.

        Args:
            tokenizer_digest: :func:`models.digests.tokenizer_digest` of the policy's tokenizer.
            vocab_size: rows of the policy's embedding; it may sample every one of these ids.
            needs_rewards: the server must serve a reward model.
            needs_critic: the server must have a critic.
            needs_bits: the server must run with ``run.deterministic``.

        Raises:
            UserError: something differs; the message has both sides' values.
        """
        self._agreement = {
            "tokenizer_digest": tokenizer_digest,
            "vocab_size": vocab_size,
            "needs_rewards": needs_rewards,
            "needs_critic": needs_critic,
            "needs_bits": needs_bits,
        }
        status = self.status()
        where = self.where
        if needs_critic and "tokens" in status.roles:
            raise UserError(
                f"{where} runs with value_model.enabled=false but the algorithm needs a critic: start it with "
                "value_model.enabled=true, or choose an algorithm without a critic, such as algorithm=grpo"
            )
        if not {"critic", "tokens"} & {*status.roles}:
            raise UserError(
                f"{where} has no critic, it serves {', '.join(status.roles)}: start servers/serve_ppo_critic.py and give its "
                "remote_critic_rm.host and remote_critic_rm.port, or with an algorithm without a critic give reward=server"
            )
        if status.tokenizer_digest != tokenizer_digest:
            raise UserError(
                f"{where} has the tokenizer {status.tokenizer_digest[:16]}, the policy {tokenizer_digest[:16]}: "
                "serve a reward model trained with the policy's tokenizer"
            )
        if status.vocab_size != vocab_size:
            raise UserError(
                f"{where} has a vocabulary of {status.vocab_size} ids, the policy {vocab_size}: "
                "serve a reward model whose embedding has the policy's size"
            )
        if needs_bits and not status.repeatable:
            raise UserError(
                f"run.deterministic=true, but {where} was started without it: start it with run.deterministic=true"
            )
        if needs_rewards:
            self.require_rewards(status)
        self._connection.boot_id, self.ranks = status.boot_id, status.ranks
        self._max_request_bytes = min(self._config.max_request_bytes, status.max_request_bytes)
        self._max_staged_bytes = status.max_staged_bytes
        return status

    def shake_hands_again(self) -> Status:
        """Repeat :meth:`handshake` with the same arguments: after :class:`ServerRestarted` the server is another process."""
        if self._agreement is None:
            raise RuntimeError("handshake() comes first")
        return self.handshake(**self._agreement)

    def acquire(self, run_id: str) -> int:
        """Become the only writer. An earlier holder's calls are refused from now on. Return the critic's step.

        Shakes hands again, so that after :class:`ServerRestarted` this is the first call to the new process.
        """
        digest = self.shake_hands_again().tokenizer_digest
        request = {"run_id": run_id, "tokenizer_digest": digest}
        answer = self._ask_once(protocol.ACQUIRE, request)
        self._lease = str(answer["lease"])
        return int(answer["critic_step"])

    # --- time sharing of the device -----------------------------------------------------------------------------------

    def hold(self) -> None:
        """Make inference wait for :meth:`release`. Every client of a critic that goes to sleep calls this."""
        self._turn.begun.clear()

    def release(self) -> None:
        self._turn.begun.set()

    def sleep(self) -> int:
        """Free the critic's device after the train step under way. Return the bytes that the critic still holds. A critic that
        already sleeps stays as it is."""
        return self._train_pool.submit(self._take_turn, protocol.SLEEP).result()

    def wake(self) -> int:
        """Wake the critic. Return the bytes that it holds."""
        return self._train_pool.submit(self._take_turn, protocol.WAKE).result()

    def _take_turn(self, endpoint: messages.Endpoint) -> int:
        return int(self._ask_once(endpoint, {"lease": self._require_lease()})["held_bytes"])

    # --- compute ------------------------------------------------------------------------------------------------------

    def infer(
        self, sequences: Sequence[Array], *, want: Want = "both", expect_critic_step: int | None = None
    ) -> "Future[CriticInference]":
        """Values and rewards of int32 [T] sequences. Big batches are split, by a pure function of their lengths.

        Args:
            want: the server computes nothing else.
            expect_critic_step: the server refuses with the code CONFLICT if its critic is at another step; None accepts any.
        """
        return self._infer_pool.submit(self._infer, list(sequences), Wanted(want, expect_critic_step), self._turn)

    def train(self, batch: CriticTrainBatch, *, step: int) -> "Future[dict[str, float]]":
        """Train the critic, exactly once, as its step number ``step`` (the server's critic_step + 1); resolves to metrics."""
        return self._train_pool.submit(self._train, batch, step)

    def infer_span(self) -> tuple[float, float, float] | None:
        """Start of the first inference since the last call and end of the last one, in seconds since 1970, and the seconds in
        between with inference under way. None without any inference."""
        spans, self._inferred = self._inferred, []
        return busy_span(spans) if spans else None

    def _infer(self, sequences: list[Array], wanted: Wanted, turn: "InferenceTurn") -> CriticInference:
        turn.wait()
        started = time()
        values: list[Array] = []
        rewards: list[Array] = []
        steps: set[int] = set()
        lengths = [len(sequence) for sequence in sequences]
        for rows in split(_request_bytes(lengths, INFER_BYTES_PER_TOKEN), self._max_request_bytes):
            chunk = [sequences[row] for row in rows]
            inputs = protocol.infer_tensors(chunk, wanted)
            answer = self._connection.call(protocol.INFER, inputs, timeout_s=self._config.infer_timeout_s)
            if wanted.values:
                values += messages.unragged(answer[protocol.VALUES.name], [len(sequence) for sequence in chunk])
            if wanted.rewards:
                rewards.append(answer[protocol.REWARDS.name])
            steps.add(int(answer[protocol.CRITIC_STEP.name][0]))
        self._inferred.append((started, time()))
        return CriticInference(
            values if wanted.values else None, np.concatenate(rewards) if wanted.rewards else None, frozenset(steps)
        )

    def _train(self, batch: CriticTrainBatch, step: int) -> dict[str, float]:
        lengths = [len(sequence) for sequence in batch.sequences]
        parts = [
            (
                *messages.ragged(_pick(batch.sequences, rows)).values(),
                *(_flat(arrays, rows) for arrays in _per_token(batch)),
            )
            for rows in split(_request_bytes(lengths, TRAIN_BYTES_PER_TOKEN), self._max_request_bytes)
        ]
        if (size := sum(array.nbytes for part in parts for array in part)) > self._max_staged_bytes:
            raise UserError(
                f"a train step of {size} bytes is more than {self.where} takes ({self._max_staged_bytes}): start it with a "
                "larger server.max_staged_bytes, or lower algorithm.num_rollout_samples or generation.max_length"
            )
        normalizers = batch.normalizers or [
            float(sum(int(batch.masks[row].sum()) for row in rows)) for rows in batch.mini_batches
        ]
        timeout_s = self._config.train_timeout_base_s + self._config.train_timeout_per_1k_tokens_s * sum(lengths) / 1000
        answer: dict[str, Any] = {}
        for number, arrays in enumerate(parts, start=1):
            plan = protocol.part_plan(
                lease=self._require_lease(),
                step=step,
                part=number,
                parts=parts,
                mini_batches=batch.mini_batches,
                normalizers=normalizers,
            )
            tensors = (*arrays, messages.json_tensor(plan))
            inputs = dict(zip((spec.name for spec in protocol.TRAIN.inputs), tensors, strict=True))
            answer = parse_json(self._connection.call(protocol.TRAIN, inputs, timeout_s=timeout_s))
        if answer.get("critic_step") != step:
            raise RuntimeError(f"the server at {self._connection.address} answered train step {step} with {answer}")
        return dict(answer["metrics"])

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save(
        self, checkpoint_id: str, *, critic_step: int | None = None, export: bool = False
    ) -> "Future[dict[str, Any]]":
        """Make the critic's checkpoint durable: ``files`` (digests by name), ``critic_step``, maybe ``export``.

        The checkpoint holds the train steps asked for before this call, or ``critic_step`` of them if that is given. Later train
        steps wait for its copy in memory, not for the disk.
        """
        request = {"lease": self._require_lease(), "checkpoint_id": checkpoint_id, "export": export}
        copy = request | {"critic_step": critic_step, "copy_only": True}
        return self._save_pool.submit(self._written, request, self._train_pool.submit(self._ask, protocol.SAVE, copy))

    def _written(self, request: dict[str, Any], copied: "Future[dict[str, Any]]") -> dict[str, Any]:
        return self._ask(protocol.SAVE, request | {"critic_step": copied.result()["critic_step"]})

    def commit(self, checkpoint_id: str, keep: int) -> list[str]:
        """Tell the server that the checkpoint pair is whole. It keeps the run's last ``keep`` and returns the removed ids."""
        request = {"lease": self._require_lease(), "checkpoint_id": checkpoint_id, "keep": keep}
        return list(self._ask_once(protocol.COMMIT, request)["pruned"])

    def restore(self, checkpoint_id: str, digests: dict[str, str] | None) -> int:
        """Load a checkpoint and return its critic step. It is refused unless its files have these digests."""
        request = {"lease": self._require_lease(), "checkpoint_id": checkpoint_id, "digests": digests}
        return int(self._ask_once(protocol.RESTORE, request)["critic_step"])

    # --- life ---------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the server process, with exit code 0."""
        self._ask(protocol.SHUTDOWN, {"lease": self._require_lease()})

    def forget_queued(self) -> None:
        """Cancel the inference that has not begun, because no caller waits for it any more."""
        pool, self._infer_pool = self._infer_pool, infer_pool()
        self._turn.end()
        self._turn = InferenceTurn()
        pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        self._turn.end()
        super().close()
        for pool in (self._train_pool, self._save_pool):
            pool.shutdown(cancel_futures=True)

    def _require_lease(self) -> str:
        if self._lease is None:
            raise RuntimeError("acquire() comes before every call that changes the critic")
        return self._lease


class InferenceTurn:
    """Makes inference wait while the critic is held. Once it has ended, inference raises CancelledError."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.begun.set()
        self._ended = False

    def wait(self) -> None:
        self.begun.wait()
        if self._ended:
            raise CancelledError

    def end(self) -> None:
        self._ended = True
        self.begun.set()


def _request_bytes(lengths: Sequence[int], bytes_per_token: int) -> list[int]:
    return [length * bytes_per_token + BYTES_PER_SEQUENCE for length in lengths]


def _per_token(batch: CriticTrainBatch) -> tuple[list[Array], list[Array], list[Array]]:
    return batch.returns, batch.old_values, batch.masks


def _pick(arrays: list[Array], rows: list[int]) -> list[Array]:
    return [arrays[row] for row in rows]


def _flat(arrays: list[Array], rows: list[int]) -> Array:
    return np.concatenate(_pick(arrays, rows)).astype(np.float32, copy=False)


def busy_span(spans: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """The beginning of the first span, the end of the last, and the time covered by at least one."""
    first = last = min(start for start, _ in spans)
    busy = 0.0
    for start, end in sorted(spans):
        busy += max(end - max(start, last), 0.0)
        last = max(last, end)
    return first, last, busy
