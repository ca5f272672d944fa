"""``RemoteCritic``: the critic process as the actor sees it. Needs requests, rich and NumPy, neither torch nor PyTriton.

Calls that compute return futures. A future must be awaited: it raises what went wrong.
"""

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.critic_service.connection import (
    Connection,
    LeaseLost,
    ServerAbsent,
    ServerRestarted,
    ServerUnreachable,
)
from nemo_style_rlhf.critic_service.protocol import Array, Endpoint, Status
from nemo_style_rlhf.critic_service.secret import LOOPBACK, own_token, read_token
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.remote_critic import RemoteCriticConfig

__all__ = [
    "CriticInference",
    "CriticTrainBatch",
    "LeaseLost",
    "RemoteCritic",
    "ServerAbsent",
    "ServerRestarted",
    "ServerUnreachable",
]

STATUS_TIMEOUT_S = 10.0
POLL_PERIOD_S = 0.5
TOLD_AFTER_S = (0.0, 60.0, 120.0, 300.0, 600.0)
"""When a log file is told that a server is waited for; then every 10 minutes. A terminal has a line that updates."""
INFER_THREADS = 2
"""One request computes while the next one travels; the server computes one at a time."""
INFER_BYTES_PER_TOKEN = 4
TRAIN_BYTES_PER_TOKEN = 16
BYTES_PER_SEQUENCE = 4


@dataclass(frozen=True)
class CriticInference:
    """Answers for sequences, in the order they were given."""

    values: list[Array]
    """float32 [T] per sequence, indexed by state: values[t] is V after tokens 0..t."""
    rewards: Array | None
    """float32 [B]; None from a server without a reward model."""
    critic_step: int
    """Train calls the critic had seen."""


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


class RemoteCritic:
    """Client of one server. Safe to use from several threads; close it, or use it as a context manager.

    What a call may raise is that of :meth:`Connection.call`; of a call that returns a future, the future carries it.
    """

    def __init__(self, config: RemoteCriticConfig) -> None:
        self._config = config
        token = read_token(config.token) or (own_token() if config.host in LOOPBACK else None)
        self._connection = Connection(
            config.host, config.port, token=token, retries=config.retries, peer=config.peer, tls=config.tls
        )
        self._agreement: dict[str, Any] | None = None
        self._lease: str | None = None
        self._max_request_bytes = config.max_request_bytes
        self._max_staged_bytes = 0
        self._infer_pool = _infer_pool()
        self._train_pool = ThreadPoolExecutor(1, thread_name_prefix="critic-train")
        self._save_pool = ThreadPoolExecutor(1, thread_name_prefix="critic-save")

    def __enter__(self) -> "RemoteCritic":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        return self._connection.address

    # --- handshake ----------------------------------------------------------------------------------------------------

    def wait_until_ready(self, progress: Callable[[str], None], heed: Callable[[], None] = lambda: None) -> Status:
        """:func:`wait_for_any` of this one."""
        return wait_for_any([self], progress, heed)[self]

    def handshake(self, *, tokenizer_digest: str, vocab_size: int, needs_rewards: bool) -> Status:
        """Check that both processes mean the same, and remember which server process it is.

        Args:
            tokenizer_digest: :func:`models.digests.tokenizer_digest` of the policy's tokenizer.
            vocab_size: rows of the policy's embedding; it may sample every one of these ids.
            needs_rewards: the server must serve a reward model.

        Raises:
            UserError: something differs; both sides' values are in the sentence.
        """
        self._agreement = {
            "tokenizer_digest": tokenizer_digest,
            "vocab_size": vocab_size,
            "needs_rewards": needs_rewards,
        }
        status = self._status()
        where = self._where
        if "critic" not in status.roles:
            raise UserError(
                f"{where} has no critic, it serves {', '.join(status.roles)}: start servers/serve_ppo_critic.py and give its "
                "remote_critic_rm.host and remote_critic_rm.port"
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
        if needs_rewards:
            self.require_rewards(status)
        self._connection.boot_id = status.boot_id
        self._max_request_bytes = min(self._config.max_request_bytes, status.max_request_bytes)
        self._max_staged_bytes = status.max_staged_bytes
        return status

    def shake_hands_again(self) -> Status:
        """As :meth:`handshake`, with what was agreed on there: after :class:`ServerRestarted` the server is another process."""
        if self._agreement is None:
            raise RuntimeError("handshake() comes first")
        return self.handshake(**self._agreement)

    def acquire(self, run_id: str) -> int:
        """Become the one writer; an earlier holder's calls are refused from now on. Returns the critic's step.

        Shakes hands again, so that after :class:`ServerRestarted` this is the first call to the new process.
        """
        digest = self.shake_hands_again().tokenizer_digest
        request = {"run_id": run_id, "tokenizer_digest": digest}
        answer = self._ask_once(protocol.ACQUIRE, request)
        self._lease = str(answer["lease"])
        return int(answer["critic_step"])

    # --- compute ------------------------------------------------------------------------------------------------------

    def infer(self, sequences: Sequence[Array]) -> "Future[CriticInference]":
        """Values and rewards of int32 [T] sequences; big batches are split, a pure function of their lengths."""
        return self._infer_pool.submit(self._infer, list(sequences))

    def score_text(
        self, prompts: Sequence[str], responses: Sequence[str], *, rendered: bool = False
    ) -> "Future[Array]":
        """Rewards float32 [B] of responses to prompts, tokenised by the server as its reward model was trained.

        Needs neither handshake nor lease: the policy's tokenizer may be another one. Big batches are split.

        Args:
            rendered: prompts come from a chat template that wrote all special tokens, of the server's tokenizer; else they
                are a user's own words, which the server puts the template of its reward model around.
        """
        return self._infer_pool.submit(self._score_text, list(prompts), list(responses), rendered)

    def train(self, batch: CriticTrainBatch, *, step: int) -> "Future[dict[str, float]]":
        """Train the critic, exactly once, as its step number ``step`` (the server's critic_step + 1); resolves to metrics."""
        return self._train_pool.submit(self._train, batch, step)

    def _infer(self, sequences: list[Array]) -> CriticInference:
        values: list[Array] = []
        rewards: list[Array] = []
        steps: set[int] = set()
        lengths = [len(sequence) for sequence in sequences]
        for rows in _split(_request_bytes(lengths, INFER_BYTES_PER_TOKEN), self._max_request_bytes):
            chunk = [sequences[row] for row in rows]
            answer = self._connection.call(
                protocol.INFER, protocol.ragged(chunk), timeout_s=self._config.infer_timeout_s
            )
            values += protocol.unragged(answer[protocol.VALUES.name], [len(sequence) for sequence in chunk])
            if protocol.REWARDS.name in answer:
                rewards.append(answer[protocol.REWARDS.name])
            steps.add(int(answer[protocol.CRITIC_STEP.name][0]))
        if len(steps) > 1:
            raise RuntimeError(
                f"the critic was trained while it was asked for values: steps {sorted(steps)} in one answer"
            )
        return CriticInference(values, np.concatenate(rewards) if rewards else None, steps.pop())

    def _score_text(self, prompts: list[str], responses: list[str], rendered: bool) -> Array:
        status = self._status()
        self.require_rewards(status)
        sizes = [protocol.text_nbytes((p.encode(), r.encode())) for p, r in zip(prompts, responses, strict=True)]
        rewards = np.empty(len(prompts), dtype=np.float32)
        for rows in _split(sizes, min(self._max_request_bytes, status.max_request_bytes)):
            texts = [prompts[row] for row in rows], [responses[row] for row in rows]
            inputs = protocol.reward_tensors(*texts, rendered=rendered)
            answer = self._connection.call(protocol.REWARD_INFER, inputs, timeout_s=self._config.infer_timeout_s)
            rewards[rows] = answer[protocol.REWARDS.name]
        return rewards

    def _train(self, batch: CriticTrainBatch, step: int) -> dict[str, float]:
        lengths = [len(sequence) for sequence in batch.sequences]
        parts = [
            (
                *protocol.ragged(_pick(batch.sequences, rows)).values(),
                *(_flat(arrays, rows) for arrays in _per_token(batch)),
            )
            for rows in _split(_request_bytes(lengths, TRAIN_BYTES_PER_TOKEN), self._max_request_bytes)
        ]
        if (size := sum(array.nbytes for part in parts for array in part)) > self._max_staged_bytes:
            raise UserError(
                f"a train step of {size} bytes is more than {self._where} takes ({self._max_staged_bytes}): start it with a "
                "larger critic.max_staged_bytes, or lower algorithm.num_rollout_samples or generation.max_length"
            )
        normalizers = batch.normalizers or [
            float(sum(int(batch.masks[row].sum()) for row in rows)) for rows in batch.mini_batches
        ]
        timeout_s = self._train_timeout_s(sum(lengths))
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
            tensors = (*arrays, protocol.json_tensor(plan))
            inputs = dict(zip((spec.name for spec in protocol.TRAIN.inputs), tensors, strict=True))
            answer = parse_json(self._connection.call(protocol.TRAIN, inputs, timeout_s=timeout_s))
        if answer.get("critic_step") != step:
            raise RuntimeError(f"the server at {self._connection.address} answered train step {step} with {answer}")
        return dict(answer["metrics"])

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save(
        self, checkpoint_id: str, *, critic_step: int | None = None, export: bool = False
    ) -> "Future[dict[str, Any]]":
        """Make the critic's half durable: ``files`` (digests by name), ``critic_step``, maybe ``export``.

        It is that of the train steps asked for before this call, ``critic_step`` of them where that is given; those asked for
        later wait for its copy in memory, not for the disk.
        """
        request = {"lease": self._require_lease(), "checkpoint_id": checkpoint_id, "export": export}
        copy = request | {"critic_step": critic_step, "copy_only": True}
        return self._save_pool.submit(self._written, request, self._train_pool.submit(self._ask, protocol.SAVE, copy))

    def _written(self, request: dict[str, Any], copied: "Future[dict[str, Any]]") -> dict[str, Any]:
        return self._ask(protocol.SAVE, request | {"critic_step": copied.result()["critic_step"]})

    def commit(self, checkpoint_id: str, keep: int) -> list[str]:
        """Tell the server that the pair is whole; it keeps the last ``keep`` of the run and returns what it removed."""
        request = {"lease": self._require_lease(), "checkpoint_id": checkpoint_id, "keep": keep}
        return list(self._ask_once(protocol.COMMIT, request)["pruned"])

    def restore(self, checkpoint_id: str, digests: dict[str, str] | None) -> int:
        """Load a half, refused unless its files have these digests; the critic's step after it."""
        request = {"lease": self._require_lease(), "checkpoint_id": checkpoint_id, "digests": digests}
        return int(self._ask_once(protocol.RESTORE, request)["critic_step"])

    # --- life ---------------------------------------------------------------------------------------------------------

    def status(self) -> Status:
        return self._status()

    def shutdown(self) -> None:
        """End the server process, with exit code 0."""
        self._ask(protocol.SHUTDOWN, {"lease": self._require_lease()})

    def forget_queued(self) -> None:
        """Cancel the inference that has not begun: nobody waits for it any more."""
        pool, self._infer_pool = self._infer_pool, _infer_pool()
        pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Wait for running calls and close the connections; the server keeps running."""
        self._connection.stop_retrying()
        for pool in (self._infer_pool, self._train_pool, self._save_pool):
            pool.shutdown(cancel_futures=True)
        self._connection.close()

    def _status(self, *, retry: bool = True) -> Status:
        """
        Raises:
            UserError: the server speaks another version of the protocol.
        """
        answer = parse_json(self._connection.call(protocol.STATUS, {}, timeout_s=STATUS_TIMEOUT_S, retry=retry))
        if (spoken := answer["protocol_version"]) != protocol.PROTOCOL_VERSION:  # another has other fields
            raise UserError(
                f"{self._where} speaks protocol version {spoken}, this client {protocol.PROTOCOL_VERSION}: "
                "install the same version of nemo_style_rlhf on both sides"
            )
        return Status(**answer)

    def _ask(self, endpoint: Endpoint, content: dict[str, Any]) -> dict[str, Any]:
        inputs = {protocol.REQUEST.name: protocol.json_tensor(content)}
        return parse_json(self._connection.call(endpoint, inputs, timeout_s=self._train_timeout_s(0)))

    def _ask_once(self, endpoint: Endpoint, content: dict[str, Any]) -> dict[str, Any]:
        """Ask with an id: of all attempts, the one that is delivered first counts."""
        return self._ask(endpoint, content | {"request_id": secrets.token_hex(16)})

    def require_rewards(self, status: Status) -> None:
        if "reward" not in status.roles:
            raise UserError(
                f"{self._where} serves {', '.join(status.roles)}, the actor needs reward too: start it with "
                "critic.combine_rm_and_critic_server=true, or name a servers/serve_reward_model.py in reward.server"
            )

    @property
    def _where(self) -> str:
        return f"the {self._config.peer.name} at {self._connection.address}"

    def _require_lease(self) -> str:
        if self._lease is None:
            raise RuntimeError("acquire() comes before every call that changes the critic")
        return self._lease

    def _train_timeout_s(self, tokens: int) -> float:
        return self._config.train_timeout_base_s + self._config.train_timeout_per_1k_tokens_s * tokens / 1000


def wait_for_any(
    servers: Sequence[RemoteCritic], progress: Callable[[str], None], heed: Callable[[], None] = lambda: None
) -> dict[RemoteCritic, Status]:
    """Poll until at least one of the servers answers; those that do.

    Args:
        progress: gets a line now and then; on a terminal a line of its own updates in place instead.
        heed: called whenever none has answered; raises what ends the wait.

    Raises:
        ServerAbsent: none answers within the first one's ``wait_for_server_s``.
        UserError: a wrong token, or something else answers.
    """
    config, where = servers[0]._config, " or ".join(server._where for server in servers)
    started, told = time.monotonic(), 0
    terminal = Live(console=Console(stderr=True), transient=True, auto_refresh=False)
    with terminal if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0" else nullcontext() as shown:
        while True:
            answers = {}
            for server in servers:
                try:
                    answers[server] = server._status(retry=False)
                except ServerUnreachable as error:
                    last = error
            if answers:
                return answers
            heed()
            waited, limit = time.monotonic() - started, config.wait_for_server_s
            if waited >= limit:
                raise ServerAbsent(f"{last} (waited {waited:.0f} s, {config.peer.section}.wait_for_server_s)") from last
            line = f"waiting for {where}, {limit - waited:.0f} s left; start it with {config.peer.command(config.port)}"
            if shown is not None:
                shown.update(Text(line), refresh=True)
            elif waited >= _told_after(told):
                told += 1
                progress(line)
            time.sleep(POLL_PERIOD_S)


def _told_after(times: int) -> float:
    """Seconds of waiting after which to tell of it again, if that has been done so many times."""
    last = len(TOLD_AFTER_S) - 1
    return TOLD_AFTER_S[min(times, last)] + max(times - last, 0) * TOLD_AFTER_S[-1]


def _infer_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(INFER_THREADS, thread_name_prefix="critic-infer")


def _split(sizes: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Consecutive rows whose tensors, of ``sizes`` bytes, fit into one request; the JSON plan is not counted and is small."""
    rows: list[int] = []
    total = 0
    for row, size in enumerate(sizes):
        if rows and total + size > limit:
            yield rows
            rows, total = [], 0
        rows.append(row)
        total += size
    if rows:
        yield rows


def _request_bytes(lengths: Sequence[int], bytes_per_token: int) -> list[int]:
    return [length * bytes_per_token + BYTES_PER_SEQUENCE for length in lengths]


def _per_token(batch: CriticTrainBatch) -> tuple[list[Array], list[Array], list[Array]]:
    return batch.returns, batch.old_values, batch.masks


def _pick(arrays: list[Array], rows: list[int]) -> list[Array]:
    return [arrays[row] for row in rows]


def _flat(arrays: list[Array], rows: list[int]) -> Array:
    return np.concatenate(_pick(arrays, rows)).astype(np.float32, copy=False)


def parse_json(answer: dict[str, Array]) -> dict[str, Any]:
    """The JSON object of an answer."""
    content = json.loads(answer[protocol.RESPONSE.name].item(0))
    assert isinstance(content, dict)
    return content
