"""The wire contract between actor and critic: the names, dtypes and JSON fields of every endpoint, in this file only.

``wire.messages`` holds what all our servers share: headers, errors and the ragged form of sequences. Except for ``tokens``
INT32 [N], per-token tensors are FP32 [N] and indexed by the *state*: entry t of a sequence belongs to the state after tokens
0..t, whose action is token t + 1. ``validation`` checks the content of requests. Both modules use neither HTTP nor torch and
import in both environments.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal, get_args

import numpy as np

from nemo_style_rlhf.checkpoint.names import is_checkpoint_id, is_run_id
from nemo_style_rlhf.schema.chat import Chat
from nemo_style_rlhf.wire.messages import (
    REQUEST,
    RESPONSE,
    SEQUENCE_LENGTHS,
    TOKENS,
    Array,
    Endpoint,
    TensorSpec,
    json_tensor,
    ragged,
    text_tensor,
)
from nemo_style_rlhf.wire.reading import Expected, Flag, Many

PROTOCOL_VERSION = 12

# --- models and tensors -----------------------------------------------------------------------------------------------

VALUES = TensorSpec("values", "FP32")
REWARDS = TensorSpec("rewards", "FP32")
CRITIC_STEP = TensorSpec("critic_step", "INT64", 1)
PROMPTS = TensorSpec("prompts", "BYTES")
RESPONSES = TensorSpec("responses", "BYTES")
CONVERSATIONS = TensorSpec("conversations", "INT32", 1)
RETURNS = TensorSpec("returns", "FP32")
OLD_VALUES = TensorSpec("old_values", "FP32")
MASK = TensorSpec("mask", "FP32")
PLAN = TensorSpec("plan", "BYTES", 1)
PLAN_BYTES = 17 * 2**20
"""Maximum bytes of a train plan's JSON. max_request_bytes does not count them."""


ONE_RUNS = ("critic", "tokens")
"""Roles of a server that works for one run and reads its policy's token ids."""


def _json_endpoint(name: str, *roles: str) -> Endpoint:
    return Endpoint(name, (REQUEST,), (RESPONSE,), roles)


STATUS = Endpoint("critic_status", (), (RESPONSE,), requires_boot=False)
WANTED = replace(VALUES, optional=True), replace(REWARDS, optional=True)
INFER = Endpoint("critic_infer", (TOKENS, SEQUENCE_LENGTHS, REQUEST), (*WANTED, CRITIC_STEP), ONE_RUNS)
TRAIN = Endpoint("critic_train", (TOKENS, SEQUENCE_LENGTHS, RETURNS, OLD_VALUES, MASK, PLAN), (RESPONSE,), ("critic",))
SAVE = _json_endpoint("critic_save", "critic")
COMMIT = _json_endpoint("critic_commit", "critic")
RESTORE = _json_endpoint("critic_restore", "critic")
ACQUIRE = _json_endpoint("critic_acquire", *ONE_RUNS)
SLEEP = _json_endpoint("critic_sleep", *ONE_RUNS)
WAKE = _json_endpoint("critic_wake", *ONE_RUNS)
SHUTDOWN = _json_endpoint("critic_shutdown", *ONE_RUNS)
REWARD_INFER = Endpoint("reward_infer", (PROMPTS, RESPONSES, CONVERSATIONS), (REWARDS,), ("reward",))
ENDPOINTS = (STATUS, INFER, TRAIN, SAVE, COMMIT, RESTORE, ACQUIRE, SLEEP, WAKE, SHUTDOWN, REWARD_INFER)


def largest_tensors(endpoint: Endpoint, max_request_bytes: int) -> int:
    """Bytes of tensors that a request to the endpoint may have; 0 if it takes only JSON."""
    beside = {INFER: 0, REWARD_INFER: 0, TRAIN: PLAN_BYTES}
    return max_request_bytes + beside[endpoint] if endpoint in beside else 0


# --- messages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """Limits of the served models."""

    vocab_size: int
    """Rows of the embedding: token ids are 0..vocab_size - 1."""
    max_length: int
    """Maximum tokens of one sequence."""
    max_request_bytes: int
    """Maximum tensor bytes of one request."""


@dataclass(frozen=True)
class Status:
    """``critic_status``: the server's models, limits and progress."""

    protocol_version: int
    boot_id: str
    """Changes with every start of the server process."""
    roles: list[str]
    """critic: values and training. reward: rewards of texts. tokens: without a critic, but with a lease, rewards of token ids."""
    model_digest: str
    """SHA-256 over the reward model's weights, or over the critic's starting weights if no reward model is served."""
    config_digest: str
    """SHA-256 over the settings that decide the numbers: loss, engine, dtype; for a reward server, the settings of rewards."""
    tokenizer_digest: str
    vocab_size: int
    max_length: int
    reads_conversations: bool
    """True if the reward model reads conversations of several turns, by its tokenizer's chat template."""
    templates: dict[str, Any]
    """Notes of the reward model's training from its ``prompt_template.json``: ``template``, the text around prompts, its SHA-256
    and the chat template's, ``append_eos``; empty without this file."""
    max_request_bytes: int
    max_staged_bytes: int
    """Tensor bytes of one train step, all its parts; 0 without a critic."""
    critic_step: int
    """Train calls applied so far; the next one is numbered critic_step + 1. 0 without a critic."""
    last_committed: str | None
    """Checkpoint id."""
    lease_holder: str | None
    """The run id that holds the lease."""
    busy: str | None
    """The running computation and its seconds so far; None when idle."""
    ranks: int
    """Ranks that share the sequences of a request."""
    asleep: bool
    """True if it computes nothing until ``critic_wake``, because its models are in host memory."""
    repeatable: bool
    """True if the same requests get the same bits from another process with the same settings, ``run.deterministic``."""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True)
class InferRequest:
    tokens: Array
    """int32 [N]."""
    lengths: Array
    """int32 [B]."""

    @property
    def offsets(self) -> list[int]:
        return [0, *np.cumsum(self.lengths).tolist()]


Want = Literal["rewards", "values", "both"]
WANTS: tuple[str, ...] = get_args(Want)


def _is_name(value: str) -> bool:
    return 0 < len(value) <= 200 and value.isprintable()


def _is_whole(value: int) -> bool:
    """Return True if numbers of other languages can hold it."""
    return 0 <= value < 2**53


Lease = Annotated[str, Expected("a string from critic_acquire", _is_name)]
RunId = Annotated[str, Expected("1 to 40 letters a-z and digits", is_run_id)]
RequestId = Annotated[
    str | None,
    Expected("a printable string of 1 to 200 characters, or null", lambda value: value is None or _is_name(value)),
]
CheckpointId = Annotated[
    str,
    Expected(
        "<run_id>-step_NNNNNN, with a run_id of 1 to 40 letters a-z and digits, and a step of six or more digits",
        is_checkpoint_id,
    ),
]
Step = Annotated[int, Expected("an integer from 1 up", lambda value: 1 <= value < 2**53)]
StepOrNone = Annotated[
    int | None, Expected("a number from 0 up, or null", lambda value: value is None or _is_whole(value))
]
Part = Annotated[int, Expected("an integer", lambda value: abs(value) < 2**53)]


@dataclass(frozen=True)
class Wanted:
    """The JSON ``request`` of ``critic_infer``: the results to compute for its sequences, and the critic's step."""

    want: Annotated[Want, Expected(f"{', '.join(WANTS[:-1])} or {WANTS[-1]}")]
    expect_critic_step: StepOrNone = None
    """The request is refused if the critic is at another step. None accepts any step."""

    @property
    def values(self) -> bool:
        return self.want != "rewards"

    @property
    def rewards(self) -> bool:
        return self.want != "values"


@dataclass(frozen=True)
class RewardRequest:
    """``reward_infer``: texts, so that the reward model's tokenizer and template may differ from the policy's."""

    prompts: Sequence[str | Chat]
    """A user's own words, without any template; or conversations, to be rendered by the reward model's chat template."""
    responses: list[str]
    """One for each prompt."""


@dataclass(frozen=True)
class TrainPlan:
    """The division of a train step into optimizer steps. It is sent with the last part."""

    mini_batches: list[list[int]]
    """Sequence indices over all parts, in order; one optimizer step each. A sequence may be in none, or in several."""
    normalizers: list[float]
    """Divisor of each mini-batch's summed loss, normally its count of unmasked tokens."""
    digest: str
    """:func:`train_digest` of the whole step."""


@dataclass(frozen=True)
class TrainPart:
    """Part ``part`` of ``parts`` (from 1) of train step ``step``; tensors as in :class:`InferRequest`, float32 [N] each."""

    lease: str
    step: int
    part: int
    parts: int
    sequences: InferRequest
    returns: Array
    old_values: Array
    mask: Array
    """1 exactly where the action (token t + 1) was produced by the policy."""
    plan: TrainPlan | None
    """Present only in the last part."""

    def digest(self) -> str:
        """Distinguishes a repeated part from a different part with the same number."""
        head = json.dumps([self.parts, asdict(self.plan) if self.plan else None])
        return _sha256([head.encode(), *(array.tobytes() for array in self.arrays())])

    def arrays(self) -> tuple[Array, ...]:
        return self.sequences.tokens, self.sequences.lengths, self.returns, self.old_values, self.mask

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def owned(self) -> "TrainPart":
        """A copy that outlives its request: PyTriton's arrays are views of memory that the next request overwrites."""
        sequences = InferRequest(self.sequences.tokens.copy(), self.sequences.lengths.copy())
        returns, old_values, mask = self.returns.copy(), self.old_values.copy(), self.mask.copy()
        return replace(self, sequences=sequences, returns=returns, old_values=old_values, mask=mask)


@dataclass(frozen=True)
class PartHeader:
    """The JSON ``plan`` of ``critic_train``; the last three fields belong to the last part."""

    lease: Lease
    step: Step
    part: Part
    parts: Part
    mini_batches: Annotated[
        Many[Many[int]] | None,
        Expected(
            "a list of lists of sequence indices",
            lambda value: value is not None and all(abs(row) < 2**53 for rows in value for row in rows),
        ),
    ] = None
    normalizers: Annotated[Many[float] | None, Expected("a list of numbers", lambda value: value is not None)] = None
    digest: Annotated[str | None, Expected("a SHA-256 digest", lambda value: value is not None and _is_name(value))] = (
        None
    )


@dataclass(frozen=True)
class AcquireRequest:
    run_id: RunId
    """1 to 40 letters a-z and digits. The lease changes only this run's checkpoints."""
    tokenizer_digest: Annotated[str, Expected("a string", _is_name)]
    request_id: RequestId = None
    """Chosen by the caller, new for every request. A repeated request has the same id and gets the same answer."""


@dataclass(frozen=True)
class SaveRequest:
    lease: Lease
    checkpoint_id: CheckpointId
    """``<run_id>-step_NNNNNN``, of the run that acquired the lease."""
    critic_step: StepOrNone = None
    """The critic's step to save. Refused if the critic is at another step, unless it was copied. None: the current step."""
    copy_only: Flag = False
    """Answer once the state is copied in memory for the files. The same request without this flag waits for the files."""
    export: Flag = False
    """Also write the critic as a Hugging Face directory."""


@dataclass(frozen=True)
class RestoreRequest:
    lease: Lease
    checkpoint_id: CheckpointId
    digests: Annotated[
        dict[str, Any] | None,
        Expected(
            "an object of file names and SHA-256 digests",
            lambda value: value is None or all(isinstance(each, str) for each in value.values()),
        ),
    ] = None
    """The files' SHA-256 according to the manifest; None accepts the files as they are."""
    request_id: RequestId = None
    """As in :class:`AcquireRequest`."""


@dataclass(frozen=True)
class CommitRequest:
    lease: Lease
    checkpoint_id: CheckpointId
    keep: Annotated[int, Expected("a number from 0 up", _is_whole)]
    """Number of committed checkpoints of the run that stay on disk, this one included; 0 removes all, and the run's exports."""
    request_id: RequestId = None
    """As in :class:`AcquireRequest`."""


@dataclass(frozen=True)
class TurnRequest:
    """``critic_sleep`` and ``critic_wake``."""

    lease: Lease
    request_id: RequestId = None
    """As in :class:`AcquireRequest`."""


@dataclass(frozen=True)
class ShutdownRequest:
    lease: Lease


# --- writing ----------------------------------------------------------------------------------------------------------


def reward_tensors(prompts: Sequence[str | Chat], responses: Sequence[str]) -> dict[str, Array]:
    """The inputs of ``reward_infer``, as in :class:`RewardRequest`; prompts are all of one kind."""
    return {
        PROMPTS.name: text_tensor([prompt_text(prompt) for prompt in prompts]),
        RESPONSES.name: text_tensor(responses),
        CONVERSATIONS.name: np.array([any(isinstance(prompt, Chat) for prompt in prompts)], dtype=np.int32),
    }


def prompt_text(prompt: str | Chat) -> str:
    """Encode a prompt for the wire: a conversation as JSON, text as it is."""
    return prompt.to_json() if isinstance(prompt, Chat) else prompt


def infer_tensors(sequences: Sequence[Array] | Sequence[list[int]], wanted: Wanted) -> dict[str, Array]:
    """The inputs of ``critic_infer``."""
    return ragged(sequences) | {REQUEST.name: json_tensor(asdict(wanted))}


def part_plan(
    *,
    lease: str,
    step: int,
    part: int,
    parts: Sequence[tuple[Array, ...]],
    mini_batches: list[list[int]],
    normalizers: Sequence[float],
) -> dict[str, Any]:
    """The ``plan`` of part ``part`` (from 1) of ``parts``, tuples as in :func:`train_digest`."""
    plan: dict[str, Any] = {"lease": lease, "step": step, "part": part, "parts": len(parts)}
    if part == len(parts):
        numbers = [float(number) for number in normalizers]
        plan |= {"mini_batches": mini_batches, "normalizers": numbers}
        plan["digest"] = train_digest(parts, mini_batches, numbers)
    return plan


def train_digest(
    parts: Sequence[tuple[Array, ...]], mini_batches: list[list[int]], normalizers: Sequence[float]
) -> str:
    """SHA-256 over a whole train step, whatever parts it was cut into.

    ``parts`` hold (tokens, lengths, returns, old_values, mask). Hashed: each of the five, concatenated over the parts,
    as little-endian bytes; then the JSON ``[mini_batches, normalizers]`` with normalizers as floats and no spaces.
    """
    plan = json.dumps([mini_batches, [float(number) for number in normalizers]], separators=(",", ":"))
    arrays = [part[which].tobytes() for which in range(5) for part in parts]
    return _sha256([*arrays, plan.encode()])


def _sha256(chunks: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()
