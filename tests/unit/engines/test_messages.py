"""Requests to an engine and its samples arrive as they were sent; what cannot be sampled is refused in one sentence."""

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from nemo_style_rlhf.engines.messages import (
    GENERATE,
    LIMITS,
    SEEDS,
    generate_inputs,
    generate_outputs,
    parse_completions,
    parse_generate,
)
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, SampleId
from nemo_style_rlhf.schema.generation import NO_OVERRIDES, SamplingOverrides
from nemo_style_rlhf.wire.kserve import (
    BINARY_ANSWERS,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)
from nemo_style_rlhf.wire.messages import (
    REQUEST,
    SEQUENCE_LENGTHS,
    TOKENS,
    Array,
    Code,
    ProtocolError,
    bytes_tensor,
    json_tensor,
)

EVERY_OVERRIDE = SamplingOverrides(
    temperature=0.7, top_p=0.9, top_k=5, max_length=6, min_length=2, stop=("ä\n", " "), stop_token_ids=(9, 10)
)
OVERRIDES = [NO_OVERRIDES, EVERY_OVERRIDE, SamplingOverrides(top_k=0), SamplingOverrides(stop=()), NO_OVERRIDES]
PROMPTS = [(3,), (4, 5, 6), (0, 2**31 - 1), (7,) * 50, (8,)]
SEEDS_USED = [0, 2**31 - 1, 2**63 - 1, 5, 5]
REQUESTS = [
    GenerationRequest(SampleId(0, index, 0), prompt, seed, 1 + index, sampling)
    for index, (prompt, seed, sampling) in enumerate(zip(PROMPTS, SEEDS_USED, OVERRIDES, strict=True))
]
Inputs = dict[str, Array]


def inputs() -> Inputs:
    return generate_inputs(REQUESTS, lease="trainer", version=12)


def content(**changes: object) -> Array:
    return json_tensor({"lease": "trainer", "version": 12, "sampling": {}} | changes)


def test_requests_arrive_as_they_were_sent() -> None:
    body, head_length = encode_request(GENERATE, inputs())
    requests, lease, version = parse_generate(decode_request(GENERATE, body, head_length))
    assert (requests, lease, version) == (REQUESTS, "trainer", 12)


def test_an_engine_numbers_the_samples_of_a_call_itself() -> None:
    own = [GenerationRequest(SampleId(4, 77, 3), (5, 6), 1, 2), GenerationRequest(SampleId(4, 77, 2), (5,), 1, 2)]
    requests, _, _ = parse_generate(generate_inputs(own, lease="trainer", version=0))
    assert [request.sample for request in requests] == [SampleId(0, 0, 0), SampleId(0, 1, 0)]


def test_samples_arrive_with_the_bits_of_their_log_probabilities() -> None:
    values = [-0.0, 0.0, -1e-45, -math.inf, -1 / 3, math.nan, -math.pi]
    lengths = [2, 1, 2, 1, 1]
    logprobs = torch.tensor(values).split(lengths)
    completions = [
        Completion(request, torch.arange(length), own, reason, 12)
        for request, length, own, reason in zip(
            REQUESTS, lengths, logprobs, ["stop", "length", "stop", "stop", "length"], strict=True
        )
    ]
    body, head_length = encode_response(GENERATE, generate_outputs(completions), BINARY_ANSWERS)
    arrived = parse_completions(REQUESTS, decode_response(body, head_length), 12)
    for sent, got in zip(completions, arrived, strict=True):
        assert got.request is sent.request
        assert (got.finish_reason, got.weights_version) == (sent.finish_reason, 12)
        assert got.token_ids.dtype == torch.int64 and torch.equal(got.token_ids, sent.token_ids)
        assert got.logprobs.dtype == torch.float32
        assert torch.equal(got.logprobs.view(torch.int32), sent.logprobs.view(torch.int32))
    arrived[0].token_ids[0] = arrived[0].logprobs[0] = 1  # its own memory, and writable


CHANGES: dict[str, Callable[[Inputs], Inputs]] = {
    "one token too many": lambda given: {TOKENS.name: np.append(given[TOKENS.name], np.int32(1))},
    "one token missing": lambda given: {TOKENS.name: given[TOKENS.name][:-1]},
    "no tokens": lambda given: {TOKENS.name: given[TOKENS.name][:0]},
    "a negative token": lambda given: {
        TOKENS.name: np.where(given[TOKENS.name] == 3, np.int32(-1), given[TOKENS.name])
    },
    "a prompt of no tokens": lambda given: {SEQUENCE_LENGTHS.name: np.array([0, 4, 2, 50, 1], dtype=np.int32)},
    "a negative length": lambda given: {SEQUENCE_LENGTHS.name: np.array([-1, 5, 2, 50, 1], dtype=np.int32)},
    "lengths whose sum wraps": lambda given: {
        SEQUENCE_LENGTHS.name: np.array([2**31 - 1, 2**31 - 1, 2, 56, 1], dtype=np.int32)
    },
    "a length missing": lambda given: {SEQUENCE_LENGTHS.name: np.array([4, 2, 50, 1], dtype=np.int32)},
    "a seed missing": lambda given: {SEEDS.name: given[SEEDS.name][1:]},
    "a negative seed": lambda given: {SEEDS.name: given[SEEDS.name] - 1},
    "a limit missing": lambda given: {LIMITS.name: given[LIMITS.name][1:]},
    "a limit of 0": lambda given: {LIMITS.name: given[LIMITS.name] * 0},
    "a negative limit": lambda given: {LIMITS.name: -given[LIMITS.name]},
    "no requests": lambda given: {name: array[:0] for name, array in given.items() if name != REQUEST.name},
    "no JSON": lambda given: {REQUEST.name: bytes_tensor(b"{")},
    "no text": lambda given: {REQUEST.name: bytes_tensor(b"\xff\xfe")},
    "a deep JSON": lambda given: {REQUEST.name: bytes_tensor(b"[" * 100_000)},
    "a list": lambda given: {REQUEST.name: bytes_tensor(b"[]")},
    "an unknown field": lambda given: {REQUEST.name: content(priority=1)},
    "no lease": lambda given: {REQUEST.name: json_tensor({"version": 12, "sampling": {}})},
    "a lease that is no text": lambda given: {REQUEST.name: content(lease=5)},
    "a version that is no number": lambda given: {REQUEST.name: content(version=True)},
    "sampling that is a list": lambda given: {REQUEST.name: content(sampling=[{}])},
    "an unknown sampling setting": lambda given: {REQUEST.name: content(sampling={"1": {"beams": 5}})},
    "an impossible temperature": lambda given: {REQUEST.name: content(sampling={"1": {"temperature": 0}})},
    "settings that are no object": lambda given: {REQUEST.name: content(sampling={"1": [0.5]})},
    "settings of a request that is not there": lambda given: {REQUEST.name: content(sampling={"5": {"top_k": 1}})},
    "settings of a request with another name": lambda given: {REQUEST.name: content(sampling={"01": {"top_k": 1}})},
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_impossible_request_is_refused(change: str) -> None:
    given = inputs()
    with pytest.raises(ProtocolError) as refused:
        parse_generate(given | CHANGES[change](given))
    assert refused.value.code is Code.INVALID
    assert "\n" not in str(refused.value)


def test_a_request_is_told_as_json_with_the_settings_that_were_given_alone() -> None:
    told = json.loads(inputs()[REQUEST.name][0])["sampling"]
    assert sorted(told) == ["1", "2", "3"] and told["2"] == {"top_k": 0} and told["3"] == {"stop": []}
