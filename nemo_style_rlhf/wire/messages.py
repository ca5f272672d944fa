"""Tensors, endpoints, headers and errors that all our servers send and receive, whatever they compute.

KServe v2 over HTTP with binary tensors. Sequences travel ragged: ``tokens`` INT32 [N] are the sequences end to end and
``sequence_lengths`` INT32 [B] says where they end, so N is their sum. This module uses neither HTTP nor torch and imports in
both environments; ``kserve`` writes and reads the bodies.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

HEADER_PATTERN = "(?i)x-critic-.*"
"""Headers that the backend of a front door hands to its service."""
TOKEN_HEADER = "x-critic-token"
BOOT_HEADER = "x-critic-boot"
"""The boot id that the client expects. A server that has restarted since refuses, instead of answering with other weights."""


class Code(Enum):
    """The reason for a refusal. The value is (wire name, HTTP status of a service that refuses)."""

    INVALID = ("invalid", 400)
    UNAUTHORIZED = ("unauthorized", 400)
    LEASE_LOST = ("lease_lost", 400)
    WRONG_STEP = ("wrong_step", 400)
    CONFLICT = ("conflict", 400)
    NOT_FOUND = ("not_found", 404)
    PENDING = ("pending", 503)
    RESTARTED = ("restarted", 503)
    STOPPING = ("stopping", 503)
    NON_FINITE = ("non_finite", 500)
    STORAGE = ("storage", 500)
    INTERNAL = ("internal", 500)

    @property
    def wire(self) -> str:
        return self.value[0]

    @property
    def status(self) -> int:
        return self.value[1]


class ProtocolError(Exception):
    """A request was refused and changed nothing: ``code`` for programs, one sentence without paths for people."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(f"[{code.wire}] {message}")
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the error, to send it between ranks."""
        return ProtocolError, (self.code, self.message)

    @property
    def fatal(self) -> bool:
        """The process that raises it must end: it holds no valid weights any more."""
        return self.code is Code.NON_FINITE

    @classmethod
    def parse(cls, text: str) -> "ProtocolError":
        """The inverse of ``str(error)``. A refusal by the backend itself carries no code and is INVALID."""
        match = re.match(r"^\[(\w+)\] (.*)$", text, re.DOTALL)
        codes = {code.wire: code for code in Code}
        if match and match[1] in codes:
            return cls(codes[match[1]], match[2])
        return cls(Code.INVALID, text)


# --- tensors and endpoints --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of rank 1; ``size`` None means any length. BYTES tensors are object arrays of ``bytes``."""

    name: str
    datatype: str
    size: int | None = None
    optional: bool = False
    """True if an answer may lack it."""

    @property
    def dtype(self) -> Any:
        return DTYPES[self.datatype]


DTYPES: dict[str, Any] = {"INT32": np.int32, "INT64": np.int64, "FP32": np.float32, "BYTES": np.object_}
BYTES_PREFIX = 4
"""Bytes that hold the length before each element of a BYTES tensor."""

TOKENS = TensorSpec("tokens", "INT32")
SEQUENCE_LENGTHS = TensorSpec("sequence_lengths", "INT32")
REQUEST = TensorSpec("request", "BYTES", 1)
RESPONSE = TensorSpec("response", "BYTES", 1)
ERROR = TensorSpec("error", "BYTES", 1)
"""Carries an error from the service to the binding. On the wire it becomes an HTTP status and ``{"error": ...}``."""


@dataclass(frozen=True)
class Endpoint:
    """A model in KServe's terms: its name and tensors."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    roles: tuple[str, ...] = ()
    """Bound only by servers with one of these roles; by every server if there are none."""
    requires_boot: bool = True
    """True if the client sends the boot id that it expects. An endpoint that returns the boot id answers without it."""


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


def text_nbytes(elements: Iterable[bytes]) -> int:
    """Bytes of a BYTES tensor on the wire. Each element follows its length in four bytes."""
    return sum(BYTES_PREFIX + len(element) for element in elements)


def ragged(sequences: Sequence[Array] | Sequence[list[int]]) -> dict[str, Array]:
    """``tokens`` and ``sequence_lengths`` of int sequences."""
    return {
        TOKENS.name: np.concatenate(sequences).astype(np.int32, copy=False),
        SEQUENCE_LENGTHS.name: np.array([len(sequence) for sequence in sequences], dtype=np.int32),
    }


def unragged(flat: Array, lengths: Sequence[int] | Array) -> list[Array]:
    """[N] to one array per sequence."""
    return np.split(flat, np.cumsum(lengths)[:-1])
