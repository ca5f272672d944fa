"""The wire contract between a trainer and its generation engines; tensors and errors as in ``wire/messages.py``.

A lease names the trainer that an engine works for. A new lease drops the requests and the weights of the one before.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
import torch

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, SampleId
from nemo_style_rlhf.schema.generation import SamplingOverrides
from nemo_style_rlhf.wire.messages import (
    REQUEST,
    RESPONSE,
    SEQUENCE_LENGTHS,
    TOKENS,
    Array,
    Code,
    Endpoint,
    ProtocolError,
    TensorSpec,
    json_tensor,
    ragged,
    unragged,
)
from nemo_style_rlhf.wire.reading import Expected, Many, read

PROTOCOL_VERSION = 5
SEEDS = TensorSpec("seeds", "INT64")
LIMITS = TensorSpec("limits", "INT32")
"""Maximum response tokens of each request."""
LOGPROBS = TensorSpec("logprobs", "FP32")
"""[N], nats, of the sampled tokens under the distribution that they were sampled from."""
CONTENT = TensorSpec("content", "BYTES", 1)
"""Bytes of a file of a version of the weights, from an offset on."""

STATUS = Endpoint("engine_status", (), (RESPONSE,), requires_boot=False)
ACQUIRE = Endpoint("engine_acquire", (REQUEST,), (RESPONSE,))
SEND = Endpoint("engine_send", (CONTENT, REQUEST), (RESPONSE,))
RECEIVE = Endpoint("engine_receive", (REQUEST,), (RESPONSE,))
LOAD = Endpoint("engine_load", (REQUEST,), (RESPONSE,))
GENERATE = Endpoint(
    "engine_generate",
    (TOKENS, SEQUENCE_LENGTHS, SEEDS, LIMITS, REQUEST),
    (TOKENS, SEQUENCE_LENGTHS, LOGPROBS, RESPONSE),
)
SLEEP = Endpoint("engine_sleep", (REQUEST,), (RESPONSE,))
SHUTDOWN = Endpoint("engine_shutdown", (REQUEST,), (RESPONSE,))
ENDPOINTS = (STATUS, ACQUIRE, SEND, RECEIVE, LOAD, GENERATE, SLEEP, SHUTDOWN)


@dataclass(frozen=True)
class EngineStatus:
    """``engine_status``."""

    protocol_version: int
    boot_id: str
    lease: str | None
    version: int | None
    """Version of the weights, as its lease counts them; None before the first load under that lease."""
    digest: str | None
    """Digest of these weights."""
    running: int
    """Waiting and running requests."""
    steps: int
    """Steps that the engine has made; an engine with requests that makes none hangs."""
    cache_share: float
    """Largest share of the KV cache that was in use since the last load."""
    max_sequence_length: int
    """Tokens of prompt and response."""
    max_request_bytes: int
    """Tensor bytes of one request."""
    repeatable: bool
    """True if it samples with ``run.deterministic``."""


def _are_sizes(shape: Any) -> bool:
    return isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)


def _is_file(pair: Any) -> bool:
    return (
        isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and type(pair[1]) is int and pair[1] > 0
    )


Text = Annotated[str, Expected("a string")]
Number = Annotated[int, Expected("a whole number")]


@dataclass(frozen=True)
class LeaseRequest:
    """A request to ``engine_sleep`` or ``engine_shutdown``."""

    lease: Text


@dataclass(frozen=True)
class EngineAcquireRequest:
    """A request to ``engine_acquire`` takes the lease and announces the weights."""

    lease: Text
    shapes: Annotated[
        dict[str, Any],
        Expected("a list of sizes for each tensor", lambda shapes: all(map(_are_sizes, shapes.values()))),
    ]
    """Sizes of each tensor of the weights, by name."""


@dataclass(frozen=True)
class SendRequest:
    """A request to ``engine_send`` brings a piece of a file of weights."""

    lease: Text
    file: Text
    offset: Number
    """Bytes of the file that were sent before."""


@dataclass(frozen=True)
class ReceiveRequest:
    """A request to ``engine_receive`` makes the engine meet the group of ranks that broadcasts the weights."""

    lease: Text
    group: Text
    rank: Number
    size: Number
    """Ranks of the group, the trainer's included."""
    backend: Text
    files: Annotated[
        Many[Any],
        Expected("a name and a number of bytes for each file, in order", lambda files: all(map(_is_file, files))),
    ]


@dataclass(frozen=True)
class LoadRequest:
    """A request to ``engine_load`` names the folder and the digest of the weights to load."""

    lease: Text
    folder: Text
    digest: Text


@dataclass(frozen=True)
class GenerateRequest:
    """The JSON of ``engine_generate``; prompts, seeds and limits are tensors."""

    lease: Text
    version: Number
    sampling: Annotated[dict[str, Any], Expected("an object of settings by number of the request")]


def generate_inputs(requests: Sequence[GenerationRequest], *, lease: str, version: int) -> dict[str, Array]:
    """The inputs of ``engine_generate``: the requests, to be sampled from the weights of ``version``."""
    sampling = {index: _given(request.sampling) for index, request in enumerate(requests) if _given(request.sampling)}
    return ragged([list(request.prompt) for request in requests]) | {
        SEEDS.name: np.array([request.seed for request in requests], dtype=np.int64),
        LIMITS.name: np.array([request.max_tokens for request in requests], dtype=np.int32),
        REQUEST.name: json_tensor({"lease": lease, "version": version, "sampling": sampling}),
    }


def _given(sampling: SamplingOverrides) -> dict[str, Any]:
    return {name: value for name, value in asdict(sampling).items() if value is not None}


def parse_generate(inputs: dict[str, Array]) -> tuple[list[GenerationRequest], str, int]:
    """The requests, the lease and the version. The sample ids of requests are their numbers in the call.

    Raises:
        ProtocolError: INVALID.
    """
    asked = read(inputs[REQUEST.name], GenerateRequest)
    lengths, seeds, limits = (inputs[spec.name] for spec in (SEQUENCE_LENGTHS, SEEDS, LIMITS))
    tokens = inputs[TOKENS.name]
    if not 0 < len(lengths) == len(seeds) == len(limits) or (lengths < 1).any() or (limits < 1).any():
        raise ProtocolError(Code.INVALID, "every prompt needs a length, a seed and a limit, lengths and limits above 0")
    if (seeds < 0).any():  # vLLM takes -1 for no seed at all, so that a repeated call would get other samples
        raise ProtocolError(Code.INVALID, f"seed {seeds.min()} is not possible: expected 0 or more")
    if int(lengths.sum(dtype=np.int64)) != len(tokens) or (tokens < 0).any():
        raise ProtocolError(
            Code.INVALID, f"{len(tokens)} token ids, all 0 or more, must be the sum of the prompts' lengths"
        )
    if unknown := asked.sampling.keys() - set(map(str, range(len(lengths)))):
        raise ProtocolError(
            Code.INVALID, f"sampling settings of request {min(unknown)[:20]!r}, which is not in the call"
        )
    requests = []
    for index, prompt in enumerate(unragged(tokens, lengths)):
        try:
            sampling = SamplingOverrides.parse(asked.sampling.get(str(index), {}), f"request {index}")
        except UserError as error:
            raise ProtocolError(Code.INVALID, str(error)) from error
        requests.append(
            GenerationRequest(
                SampleId(0, index, 0), tuple(prompt.tolist()), int(seeds[index]), int(limits[index]), sampling
            )
        )
    return requests, asked.lease, asked.version


def digest(inputs: dict[str, Array]) -> str:
    """Digest by which a repeated call is recognized."""
    content = hashlib.sha256()
    for name in sorted(inputs):
        array = inputs[name]
        content.update(f"{name} {array.dtype} {array.shape} ".encode())
        content.update(b"\0".join(array) if array.dtype == np.object_ else array.tobytes())
    return content.hexdigest()


def generate_outputs(completions: Sequence[Completion]) -> dict[str, Array]:
    """The outputs of ``engine_generate``, in the order of the requests."""
    reasons = [completion.finish_reason for completion in completions]
    return ragged([completion.token_ids.numpy() for completion in completions]) | {
        LOGPROBS.name: torch.cat([completion.logprobs for completion in completions]).numpy(),
        RESPONSE.name: json_tensor({"finish_reasons": reasons}),
    }


def parse_completions(
    requests: Sequence[GenerationRequest], outputs: dict[str, Array], version: int
) -> list[Completion]:
    lengths = outputs[SEQUENCE_LENGTHS.name].tolist()
    reasons = json.loads(outputs[RESPONSE.name][0])["finish_reasons"]
    tokens = torch.from_numpy(outputs[TOKENS.name].astype(np.int64)).split(lengths)
    logprobs = torch.from_numpy(outputs[LOGPROBS.name].copy()).split(lengths)
    return [
        Completion(request, ids, own, reason, version)
        for request, ids, own, reason in zip(requests, tokens, logprobs, reasons, strict=True)
    ]
