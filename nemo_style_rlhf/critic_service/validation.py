"""Reads a request into a message of ``protocol``, or refuses it with the name of the tensor and the rule that it breaks.

This module imports only NumPy and the standard library, and nothing here has side effects.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, NoReturn, TypeVar

import numpy as np

from nemo_style_rlhf.checkpoint.names import is_checkpoint_id, is_run_id
from nemo_style_rlhf.critic_service.protocol import (
    CONVERSATIONS,
    INFER,
    MASK,
    OLD_VALUES,
    PLAN,
    PROMPTS,
    RESPONSES,
    RETURNS,
    REWARD_INFER,
    TRAIN,
    WANTS,
    InferRequest,
    Limits,
    RewardRequest,
    TrainPart,
    TrainPlan,
    Wanted,
)
from nemo_style_rlhf.schema.chat import Chat
from nemo_style_rlhf.transport.messages import (
    REQUEST,
    SEQUENCE_LENGTHS,
    TOKENS,
    Array,
    Code,
    ProtocolError,
    TensorSpec,
    ragged,
    text_nbytes,
)

Message = TypeVar("Message")

MAX_PARTS = 1024
MAX_JSON_BYTES = 16 * 2**20


def read_infer(inputs: Mapping[str, Array], limits: Limits) -> tuple[InferRequest, Wanted]:
    """Read the sequences of a request, and the results that it asks for.

    Raises:
        ProtocolError: INVALID, naming the tensor or field and the rule.
    """
    _check_tensors(inputs, INFER.inputs, limits)
    return _read_sequences(inputs, limits), read_json(inputs[REQUEST.name], Wanted)


def _read_sequences(inputs: Mapping[str, Array], limits: Limits) -> InferRequest:
    tokens, lengths = inputs[TOKENS.name], inputs[SEQUENCE_LENGTHS.name]
    if lengths.size == 0:
        _refuse("sequence_lengths is empty: send at least one sequence")
    bad = (lengths < 1) | (lengths > limits.max_length)
    if bad.any():
        row = int(bad.argmax())
        _refuse(f"sequence_lengths[{row}] is {lengths[row]}, expected 1..{limits.max_length}")
    total = int(lengths.sum(dtype=np.int64))
    if total != tokens.size:
        _refuse(f"sequence_lengths add up to {total} but tokens has {tokens.size} entries")
    bad = (tokens < 0) | (tokens >= limits.vocab_size)
    if bad.any():
        place = int(bad.argmax())
        _refuse(f"tokens[{place}] is {tokens[place]}, outside the vocabulary 0..{limits.vocab_size - 1}")
    return InferRequest(tokens, lengths)


def read_reward(inputs: Mapping[str, Array], limits: Limits) -> RewardRequest:
    """Read the texts of a request.

    Raises:
        ProtocolError: INVALID, naming the tensor and the rule.
    """
    _check_tensors(inputs, REWARD_INFER.inputs, limits)
    prompts, responses = inputs[PROMPTS.name], inputs[RESPONSES.name]
    if prompts.size == 0:
        _refuse("prompts is empty: send at least one text")
    if responses.size != prompts.size:
        _refuse(f"responses has {responses.size} entries but prompts has {prompts.size}")
    _check_size(text_nbytes(prompts) + text_nbytes(responses), limits)
    if (conversations := int(inputs[CONVERSATIONS.name][0])) not in (0, 1):
        _refuse(f"conversations is {conversations}, expected 0 or 1")
    texts = _texts(prompts, PROMPTS.name)
    return RewardRequest(_chats(texts) if conversations else texts, _texts(responses, RESPONSES.name))


def _chats(texts: Sequence[str]) -> list[Chat]:
    chats = []
    for row, text in enumerate(texts):
        try:
            chats.append(Chat.from_json(text))
        except ValueError as error:
            _refuse(f"prompts[{row}] is no conversation: {error}")
    return chats


def read_tokenised(sequences: Sequence[list[int]], limits: Limits) -> InferRequest:
    """Check the sequences made from the texts of :func:`read_reward`.

    Raises:
        ProtocolError: INVALID, naming the texts and the rule.
    """
    for row, token_ids in enumerate(sequences):
        texts = f"prompts[{row}] and responses[{row}]"
        if not 1 <= len(token_ids) <= limits.max_length:
            _refuse(f"{texts} make a sequence of {len(token_ids)} tokens, expected 1..{limits.max_length}")
        if (largest := max(token_ids)) >= limits.vocab_size:
            _refuse(f"{texts} hold token {largest}, outside the reward model's vocabulary 0..{limits.vocab_size - 1}")
    return InferRequest(*ragged(sequences).values())


def read_train(inputs: Mapping[str, Array], limits: Limits) -> TrainPart:
    """Read one part of a train step.

    Raises:
        ProtocolError: INVALID, naming the tensor or field and the rule.
    """
    _check_tensors(inputs, TRAIN.inputs, limits)
    sequences = _read_sequences(inputs, limits)
    returns, old_values, mask = (inputs[spec.name] for spec in (RETURNS, OLD_VALUES, MASK))
    for name, array in (("returns", returns), ("old_values", old_values), ("mask", mask)):
        if array.size != sequences.tokens.size:
            _refuse(f"{name} has {array.size} entries but tokens has {sequences.tokens.size}")
        if not np.isfinite(array).all():
            _refuse(f"{name}[{int((~np.isfinite(array)).argmax())}] is NaN or infinite")
    if not ((mask == 0) | (mask == 1)).all():
        _refuse(f"mask[{int(((mask != 0) & (mask != 1)).argmax())}] is neither 0 nor 1")
    last = np.cumsum(sequences.lengths) - 1
    if mask[last].any():
        row = int(mask[last].argmax())
        _refuse(f"mask is 1 at the last token of sequence {row}, which has no action: mask[t] belongs to token t + 1")
    header = read_json(inputs[PLAN.name], _PartHeader, name="plan")
    if not 1 <= header.parts <= MAX_PARTS or not 1 <= header.part <= header.parts:
        _refuse(f"plan.part {header.part} of plan.parts {header.parts}: expected 1 <= part <= parts <= {MAX_PARTS}")
    return TrainPart(
        header.lease,
        header.step,
        header.part,
        header.parts,
        sequences,
        returns,
        old_values,
        mask,
        _plan(header),
    )


@dataclass(frozen=True)
class _PartHeader:
    """The JSON ``plan`` of ``critic_train``."""

    lease: str
    step: int
    part: int
    parts: int
    mini_batches: list[list[int]] | None = None
    normalizers: list[float] | None = None
    digest: str | None = None


def _plan(header: _PartHeader) -> TrainPlan | None:
    given = [name for name in ("mini_batches", "normalizers", "digest") if getattr(header, name) is not None]
    if header.part < header.parts:
        if given:
            _refuse(f"plan.{given[0]} belongs to the last part, this is part {header.part} of {header.parts}")
        return None
    if header.mini_batches is None or header.normalizers is None or header.digest is None:
        _refuse("the plan of the last part needs mini_batches, normalizers and digest")
    if not header.mini_batches or not all(header.mini_batches):
        _refuse("plan.mini_batches is empty or has an empty mini-batch: every optimizer step needs sequences")
    if len(header.normalizers) != len(header.mini_batches):
        _refuse(f"plan.normalizers has {len(header.normalizers)} entries, plan.mini_batches {len(header.mini_batches)}")
    if not all(0 < normalizer < float("inf") for normalizer in header.normalizers):
        _refuse("plan.normalizers must be finite numbers above 0: they are token counts")
    return TrainPlan(header.mini_batches, header.normalizers, header.digest)


def check_plan(plan: TrainPlan, masks: Sequence[Array]) -> None:
    """Refuse a plan whose indices do not exist, repeat within a mini-batch, or select nothing to learn from."""
    for number, rows in enumerate(plan.mini_batches):
        for row in rows:
            if not 0 <= row < len(masks):
                _refuse(f"plan.mini_batches[{number}] names sequence {row}, but the step has {len(masks)} (from 0)")
        if len(set(rows)) != len(rows):
            _refuse(f"plan.mini_batches[{number}] names a sequence twice")
        if not any(masks[row].any() for row in rows):
            _refuse(f"mask is 0 everywhere in plan.mini_batches[{number}]: that optimizer step would learn nothing")


def _check_tensors(inputs: Mapping[str, Array], specs: tuple[TensorSpec, ...], limits: Limits) -> None:
    # Texts and JSON have bounds of their own.
    numbers = [array for array in inputs.values() if array.dtype != np.object_]
    _check_size(sum(array.nbytes for array in numbers), limits)
    for spec in specs:
        if spec.name not in inputs:
            _refuse(f"tensor {spec.name} is missing")
        array = inputs[spec.name]
        if array.ndim != 1 or (spec.size is not None and array.size != spec.size):
            _refuse(f"{spec.name} has shape {list(array.shape)}, expected [{spec.size or 'N'}]")
        if spec.datatype != "BYTES" and array.dtype != spec.dtype:
            _refuse(f"{spec.name} is {array.dtype}, expected {spec.datatype}")


def _check_size(nbytes: int, limits: Limits) -> None:
    if nbytes > limits.max_request_bytes:
        _refuse(f"the request has {nbytes} bytes of tensors, expected at most {limits.max_request_bytes}: split it")


def _texts(tensor: Array, name: str) -> list[str]:
    texts = []
    for row, raw in enumerate(tensor):
        try:
            texts.append(raw.decode())
        except UnicodeDecodeError as error:
            _refuse(f"{name}[{row}] is not valid UTF-8 at byte {error.start}")
    return texts


def read_json(tensor: Array, message: type[Message], name: str = "request") -> Message:
    """Read the JSON object in a BYTES [1] tensor as the dataclass ``message``, with known keys and exact types only.

    Raises:
        ProtocolError: INVALID, naming the field.
    """
    if tensor.shape != (1,):
        _refuse(f"{name} has shape {list(tensor.shape)}, expected [1]")
    raw = tensor.item(0)
    if len(raw) > MAX_JSON_BYTES:
        _refuse(f"{name} has {len(raw)} bytes, expected at most {MAX_JSON_BYTES}")
    try:
        content = json.loads(raw, parse_constant=lambda constant: _refuse(f"{name} contains {constant}"))
    except (ValueError, RecursionError):
        _refuse(f"{name} is not valid JSON")
    if not isinstance(content, dict):
        _refuse(f"{name} is not a JSON object")
    known = {item.name: item for item in fields(message)}  # type: ignore[arg-type]
    for key in content:
        if key not in known:
            _refuse(f"{name} has the unknown field {key[:50]!r}, expected {', '.join(known)}")
    for key, item in known.items():
        if key not in content:
            if item.default is MISSING:
                _refuse(f"{name}.{key} is missing")
        elif not _CHECKS[key](content[key]):
            _refuse(f"{name}.{key} is {_shown(content[key])}, expected {_EXPECTED[key]}")
    return message(**content)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_int(value: object) -> bool:
    return type(value) is int and abs(value) < 2**53


def _is_step_or_none(value: object) -> bool:
    return value is None or (type(value) is int and 0 <= value < 2**53)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 200 and value.isprintable()


_EXPECTED = {
    "lease": "a string from critic_acquire",
    "run_id": "1 to 40 letters a-z and digits",
    "request_id": "a printable string of 1 to 200 characters, or null",
    "tokenizer_digest": "a string",
    "checkpoint_id": "<run_id>-step_NNNNNN, with a run_id of 1 to 40 letters a-z and digits, and a step of six or more digits",
    "keep": "a number from 0 up",
    "critic_step": "a number from 0 up, or null",
    "want": f"{', '.join(WANTS[:-1])} or {WANTS[-1]}",
    "expect_critic_step": "a number from 0 up, or null",
    "copy_only": "true or false",
    "export": "true or false",
    "digests": "an object of file names and SHA-256 digests",
    "step": "an integer from 1 up",
    "part": "an integer",
    "parts": "an integer",
    "mini_batches": "a list of lists of sequence indices",
    "normalizers": "a list of numbers",
    "digest": "a SHA-256 digest",
}
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "lease": _is_name,
    "run_id": is_run_id,
    "request_id": lambda value: value is None or _is_name(value),
    "tokenizer_digest": _is_name,
    "checkpoint_id": is_checkpoint_id,
    "keep": lambda value: _is_int(value) and value >= 0,
    "critic_step": _is_step_or_none,
    "want": lambda value: isinstance(value, str) and value in WANTS,
    "expect_critic_step": _is_step_or_none,
    "copy_only": lambda value: isinstance(value, bool),
    "export": lambda value: isinstance(value, bool),
    "digests": lambda value: (
        value is None or (isinstance(value, dict) and all(isinstance(entry, str) for entry in value.values()))
    ),
    "step": lambda value: _is_int(value) and value >= 1,
    "part": _is_int,
    "parts": _is_int,
    "mini_batches": lambda value: (
        isinstance(value, list) and all(isinstance(rows, list) and all(map(_is_int, rows)) for rows in value)
    ),
    "normalizers": lambda value: (
        isinstance(value, list) and all(type(entry) is float or _is_int(entry) for entry in value)
    ),
    "digest": _is_name,
}


def _refuse(message: str) -> NoReturn:
    raise ProtocolError(Code.INVALID, message)
