"""The wire contract between actor and critic: every name, dtype, JSON field and header, in this file only.

KServe v2 over HTTP with binary tensors. Sequences travel ragged: ``tokens`` INT32 [N] are the sequences end to end and
``sequence_lengths`` INT32 [B] says where they end, so N is their sum. Per-token tensors are FP32 [N] and indexed by the
*state*: entry t of a sequence belongs to the state after tokens 0..t, whose action is token t + 1. What a request must look
like is checked in ``validation``. Both modules know neither HTTP nor torch and import in both environments.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any, Literal, get_args

import numpy as np

Array = np.ndarray[Any, Any]

PROTOCOL_VERSION = 7

HEADER_PATTERN = "(?i)x-critic-.*"
"""Headers that Triton forwards to the service."""
TOKEN_HEADER = "x-critic-token"
BOOT_HEADER = "x-critic-boot"
"""The boot id the client believes in; a server that restarted since refuses, instead of answering with other weights."""


class Code(Enum):
    """Why a request was refused. The value is (wire name, Triton error kind); Triton turns the kind into an HTTP status."""

    INVALID = ("invalid", "INVALID_ARG")  # 400
    UNAUTHORIZED = ("unauthorized", "INVALID_ARG")
    LEASE_LOST = ("lease_lost", "INVALID_ARG")
    WRONG_STEP = ("wrong_step", "INVALID_ARG")
    CONFLICT = ("conflict", "INVALID_ARG")
    NOT_FOUND = ("not_found", "NOT_FOUND")  # 404
    RESTARTED = ("restarted", "UNAVAILABLE")  # 503
    STOPPING = ("stopping", "UNAVAILABLE")
    NON_FINITE = ("non_finite", "INTERNAL")  # 500
    STORAGE = ("storage", "INTERNAL")
    INTERNAL = ("internal", "INTERNAL")

    @property
    def wire(self) -> str:
        return self.value[0]

    @property
    def triton_kind(self) -> str:
        return self.value[1]


class ProtocolError(Exception):
    """A request was refused and changed nothing: ``code`` for programs, one sentence without paths for people."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(f"[{code.wire}] {message}")
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        """Between ranks."""
        return ProtocolError, (self.code, self.message)

    @property
    def fatal(self) -> bool:
        """The process that raises it must end: it holds no valid critic any more."""
        return self.code is Code.NON_FINITE

    @classmethod
    def parse(cls, text: str) -> "ProtocolError":
        """The inverse of ``str(error)``; what Triton itself refused carries no code and is INVALID."""
        match = re.match(r"^\[(\w+)\] (.*)$", text, re.DOTALL)
        codes = {code.wire: code for code in Code}
        if match and match[1] in codes:
            return cls(codes[match[1]], match[2])
        return cls(Code.INVALID, text)


# --- models and tensors -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of rank 1; ``size`` None means any length. BYTES tensors are object arrays of ``bytes``."""

    name: str
    datatype: str
    size: int | None = None

    @property
    def dtype(self) -> Any:
        return DTYPES[self.datatype]


DTYPES: dict[str, Any] = {"INT32": np.int32, "INT64": np.int64, "FP32": np.float32, "BYTES": np.object_}
BYTES_PREFIX = 4

TOKENS = TensorSpec("tokens", "INT32")
SEQUENCE_LENGTHS = TensorSpec("sequence_lengths", "INT32")
VALUES = TensorSpec("values", "FP32")
REWARDS = TensorSpec("rewards", "FP32")
CRITIC_STEP = TensorSpec("critic_step", "INT64", 1)
PROMPTS = TensorSpec("prompts", "BYTES")
RESPONSES = TensorSpec("responses", "BYTES")
RENDERED = TensorSpec("rendered", "INT32", 1)
RETURNS = TensorSpec("returns", "FP32")
OLD_VALUES = TensorSpec("old_values", "FP32")
MASK = TensorSpec("mask", "FP32")
PLAN = TensorSpec("plan", "BYTES", 1)
REQUEST = TensorSpec("request", "BYTES", 1)
RESPONSE = TensorSpec("response", "BYTES", 1)
ERROR = TensorSpec("error", "BYTES", 1)
"""How the service hands an error to the binding; on the wire it becomes an HTTP status and ``{"error": ...}``."""


@dataclass(frozen=True)
class Endpoint:
    """A Triton model: its name and tensors."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    role: str | None = None
    """Bound only by a server with this role; None by every server."""


def _json_endpoint(name: str) -> Endpoint:
    return Endpoint(name, (REQUEST,), (RESPONSE,), role="critic")


STATUS = Endpoint("critic_status", (), (RESPONSE,))
INFER = Endpoint("critic_infer", (TOKENS, SEQUENCE_LENGTHS, REQUEST), (VALUES, REWARDS, CRITIC_STEP), role="critic")
TRAIN = Endpoint(
    "critic_train", (TOKENS, SEQUENCE_LENGTHS, RETURNS, OLD_VALUES, MASK, PLAN), (RESPONSE,), role="critic"
)
SAVE = _json_endpoint("critic_save")
COMMIT = _json_endpoint("critic_commit")
RESTORE = _json_endpoint("critic_restore")
ACQUIRE = _json_endpoint("critic_acquire")
SHUTDOWN = _json_endpoint("critic_shutdown")
REWARD_INFER = Endpoint("reward_infer", (PROMPTS, RESPONSES, RENDERED), (REWARDS,), role="reward")
ENDPOINTS = (STATUS, INFER, TRAIN, SAVE, COMMIT, RESTORE, ACQUIRE, SHUTDOWN, REWARD_INFER)


# --- messages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """What the served models can take."""

    vocab_size: int
    """Rows of the embedding: token ids are 0..vocab_size - 1."""
    max_length: int
    """Tokens of one sequence."""
    max_request_bytes: int
    """Tensor bytes of one request."""


@dataclass(frozen=True)
class Status:
    """``critic_status``: who serves what, and how far it is."""

    protocol_version: int
    boot_id: str
    """Changes with every start of the server process."""
    roles: list[str]
    """critic, reward."""
    model_digest: str
    """SHA-256 over the reward model's weights, which the critic starts from."""
    config_digest: str
    """SHA-256 over what decides the numbers: loss, engine, dtype; of a server without a critic, those of the rewards."""
    tokenizer_digest: str
    vocab_size: int
    max_length: int
    templates: dict[str, Any]
    """What ``prompt_template.json`` beside the reward model notes of its training: ``template``, the text around prompts, its
    SHA-256 and that of the chat template, ``append_eos``; empty without this file."""
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
    """What the server computes at this moment, and for how long; None when idle."""

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


@dataclass(frozen=True)
class Wanted:
    """The JSON ``request`` of ``critic_infer``: what to compute for its sequences, and with which critic."""

    want: Want
    expect_critic_step: int | None = None
    """The request is refused if the critic stands at another step. None: it may stand at any."""

    @property
    def values(self) -> bool:
        return self.want != "rewards"

    @property
    def rewards(self) -> bool:
        return self.want != "values"


@dataclass(frozen=True)
class RewardRequest:
    """``reward_infer``: texts, so that the reward model's tokenizer and template may differ from the policy's."""

    prompts: list[str]
    responses: list[str]
    """One to each prompt."""
    rendered: bool
    """Whether prompts hold every special token already, as a chat template of the reward model's tokenizer writes them; else
    they are a user's own words, without any template."""


@dataclass(frozen=True)
class TrainPlan:
    """How a train step is cut into optimizer steps; travels with the last part."""

    mini_batches: list[list[int]]
    """Sequence indices over all parts, in order; one optimizer step each. A sequence may be in none, or in several."""
    normalizers: list[float]
    """What each mini-batch's summed loss is divided by: normally its count of unmasked tokens."""
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
    """Present in the last part, and only there."""

    def digest(self) -> str:
        """Tells a repeated part from another one that claims its place."""
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
class AcquireRequest:
    run_id: str
    """1 to 40 letters a-z and digits. The lease changes the checkpoints of this run alone."""
    tokenizer_digest: str
    request_id: str | None = None
    """Chosen by the caller, a new one for every request. A repeated request has the same, and gets the same answer."""


@dataclass(frozen=True)
class SaveRequest:
    lease: str
    checkpoint_id: str
    """``<run_id>-step_NNNNNN``, of the run that acquired the lease."""
    critic_step: int | None = None
    """The critic's step that is to be saved; refused once the critic has gone on, unless it was copied. None: whatever it is."""
    copy_only: bool = False
    """Answer once the copy in memory is taken from which the files are written; the same request without it waits for them."""
    export: bool = False
    """Also write the critic as a Hugging Face directory."""


@dataclass(frozen=True)
class RestoreRequest:
    lease: str
    checkpoint_id: str
    digests: dict[str, str] | None = None
    """What the manifest says the files' SHA-256 are; None takes them as they are."""
    request_id: str | None = None
    """As of :class:`AcquireRequest`."""


@dataclass(frozen=True)
class CommitRequest:
    lease: str
    checkpoint_id: str
    keep: int
    """How many committed checkpoints of the run stay on disk, this one included; 0 removes all, and the run's exports."""
    request_id: str | None = None
    """As of :class:`AcquireRequest`."""


@dataclass(frozen=True)
class ShutdownRequest:
    lease: str


# --- writing ----------------------------------------------------------------------------------------------------------


def json_tensor(content: Mapping[str, Any]) -> Array:
    """BYTES [1]."""
    return bytes_tensor(json.dumps(content, allow_nan=False).encode())


def bytes_tensor(content: bytes) -> Array:
    tensor = np.empty(1, dtype=np.object_)
    tensor[0] = content
    return tensor


def text_tensor(texts: Sequence[str]) -> Array:
    """BYTES [B], UTF-8."""
    tensor = np.empty(len(texts), dtype=np.object_)
    tensor[:] = [text.encode() for text in texts]
    return tensor


def reward_tensors(prompts: Sequence[str], responses: Sequence[str], *, rendered: bool = False) -> dict[str, Array]:
    """The inputs of ``reward_infer``, as in :class:`RewardRequest`."""
    return {
        PROMPTS.name: text_tensor(prompts),
        RESPONSES.name: text_tensor(responses),
        RENDERED.name: np.array([rendered], dtype=np.int32),
    }


def text_nbytes(elements: Iterable[bytes]) -> int:
    """What the elements of a BYTES tensor take on the wire, each with its length in four bytes before it."""
    return sum(BYTES_PREFIX + len(element) for element in elements)


def ragged(sequences: Sequence[Array] | Sequence[list[int]]) -> dict[str, Array]:
    """``tokens`` and ``sequence_lengths`` of int sequences."""
    return {
        TOKENS.name: np.concatenate(sequences).astype(np.int32, copy=False),
        SEQUENCE_LENGTHS.name: np.array([len(sequence) for sequence in sequences], dtype=np.int32),
    }


def infer_tensors(sequences: Sequence[Array] | Sequence[list[int]], wanted: Wanted) -> dict[str, Array]:
    """The inputs of ``critic_infer``."""
    return ragged(sequences) | {REQUEST.name: json_tensor(asdict(wanted))}


def unragged(flat: Array, lengths: Sequence[int] | Array) -> list[Array]:
    """[N] to one array per sequence."""
    return np.split(flat, np.cumsum(lengths)[:-1])


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
