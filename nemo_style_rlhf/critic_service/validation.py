"""Reads a request into a message of ``protocol``, or refuses it with the name of the tensor and the rule that it breaks.

This module imports no torch, and nothing here has side effects.
"""

from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np

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
    InferRequest,
    Limits,
    PartHeader,
    RewardRequest,
    TrainPart,
    TrainPlan,
    Wanted,
)
from nemo_style_rlhf.schema.chat import Chat
from nemo_style_rlhf.wire.messages import (
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
from nemo_style_rlhf.wire.reading import read

MAX_PARTS = 1024


def read_infer(inputs: Mapping[str, Array], limits: Limits) -> tuple[InferRequest, Wanted]:
    """Read the sequences of a request, and the results that it asks for.

    Raises:
        ProtocolError: INVALID, naming the tensor or field and the rule.
    """
    _check_tensors(inputs, INFER.inputs, limits)
    return _read_sequences(inputs, limits), read(inputs[REQUEST.name], Wanted)


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
    header = read(inputs[PLAN.name], PartHeader, "plan")
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


def _plan(header: PartHeader) -> TrainPlan | None:
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


def _refuse(message: str) -> NoReturn:
    raise ProtocolError(Code.INVALID, message)
