"""Bodies of requests and answers; heads that the front door must refuse, in one short sentence, before Triton sees them."""

import json
import random
import struct

import numpy as np
import pytest

from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.wire.kserve import (
    BINARY_ANSWERS,
    binary_request,
    canonical_head,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)
from nemo_style_rlhf.wire.messages import Array, Code, Endpoint, ProtocolError, TensorSpec
from tests.unit.critic_service.batches import train_inputs


def as_json(tokens, **more):
    """An infer request of one sequence."""
    lengths = {"name": "sequence_lengths", "datatype": "INT32", "shape": [1], "data": [len(tokens)]}
    wanted = {"name": "request", "datatype": "BYTES", "shape": [1], "data": ['{"want": "both"}']}
    tensors = [{"name": "tokens", "datatype": "INT32", "shape": [len(tokens)], "data": tokens}, lengths, wanted]
    return json.dumps({"inputs": tensors, **more}).encode()


@pytest.mark.parametrize("name", [[], {}, [["values"]], None, 5])
def test_an_output_whose_name_is_no_text_is_refused(name):
    with pytest.raises(ProtocolError, match=r"the outputs of critic_infer are critic_step, rewards, values"):
        binary_request(protocol.INFER, as_json([5, 6], outputs=[{"name": name}]))


def test_the_sentence_stays_short_however_many_inputs_are_given():
    head = json.dumps({"inputs": [{"name": f"tensor{number}"} for number in range(5000)]}).encode()
    with pytest.raises(ProtocolError, match=r"given are tensor0, tensor1, .*") as refused:
        canonical_head(protocol.INFER, head, 0)
    assert len(str(refused.value)) < 500


def test_kserve_bodies_round_trip() -> None:
    body, head_length = encode_request(protocol.TRAIN, train_inputs())
    head = json.loads(body[:head_length])
    assert [entry["name"] for entry in head["inputs"]] == [spec.name for spec in protocol.TRAIN.inputs]
    answer = json.dumps({"outputs": head["inputs"]}).encode()  # an echo has the same form
    outputs = decode_response(answer + body[head_length:], len(answer))
    for name, tensor in train_inputs().items():
        np.testing.assert_array_equal(outputs[name], tensor)


# --- the side of a backend ---------------------------------------------------------------------------------------------

KINDS = (
    TensorSpec("texts", "BYTES"),
    TensorSpec("tokens", "INT32"),
    TensorSpec("seeds", "INT64"),
    TensorSpec("values", "FP32"),
)
ECHO = Endpoint("echo", KINDS, KINDS)


def bytes_array(*elements: bytes) -> Array:
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array


def tensors_of_every_kind() -> dict[str, Array]:
    return {
        "texts": bytes_array(b"", b"\x00\xff", "ä".encode(), b"x" * 300),
        "tokens": np.array([-(2**31), 0, 2**31 - 1], dtype=np.int32),
        "seeds": np.array([-(2**63), 2**63 - 1], dtype=np.int64),
        "values": np.array([0.1, -0.0, np.inf, np.nan, 1e-45], dtype=np.float32),
    }


def assert_same_bits(one: dict[str, Array], other: dict[str, Array]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert array.dtype == other[name].dtype and array.shape == other[name].shape
        if array.dtype == np.object_:
            assert array.tolist() == other[name].tolist()
        else:
            assert array.tobytes() == other[name].tobytes()


def test_a_request_of_every_kind_of_tensor_round_trips() -> None:
    tensors = tensors_of_every_kind()
    body, head_length = encode_request(ECHO, tensors)
    assert_same_bits(decode_request(ECHO, body, head_length), tensors)
    rewritten = canonical_head(ECHO, body[:head_length], len(body) - head_length)  # as a backend receives it
    assert_same_bits(decode_request(ECHO, rewritten + body[head_length:], len(rewritten)), tensors)


def test_an_answer_of_every_kind_of_tensor_round_trips() -> None:
    tensors = tensors_of_every_kind()
    assert_same_bits(decode_response(*encode_response(ECHO, tensors, BINARY_ANSWERS)), tensors)


def test_empty_tensors_round_trip() -> None:
    tensors = {spec.name: np.zeros(0, dtype=spec.dtype) for spec in KINDS}
    body, head_length = encode_request(ECHO, tensors)
    assert_same_bits(decode_request(ECHO, body, head_length), tensors)
    assert_same_bits(decode_response(*encode_response(ECHO, tensors, BINARY_ANSWERS)), tensors)


def test_an_answer_in_json_is_json_alone() -> None:
    tensors = {
        "texts": bytes_array(b"", "ä".encode()),
        "tokens": np.array([3], dtype=np.int32),
        "seeds": np.array([2**63 - 1], dtype=np.int64),
        "values": np.array([0.5], dtype=np.float32),
    }
    body, head_length = encode_response(ECHO, tensors, {"parameters": {"binary_data_output": False}})
    assert head_length is None
    answer = json.loads(body)
    assert answer["model_name"] == "echo"
    assert [(each["name"], each["datatype"], each["shape"], each["data"]) for each in answer["outputs"]] == [
        ("texts", "BYTES", [2], ["", "ä"]),
        ("tokens", "INT32", [1], [3]),
        ("seeds", "INT64", [1], [2**63 - 1]),
        ("values", "FP32", [1], [0.5]),
    ]


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", 4) + b"abc",  # one byte is missing
        struct.pack("<I", 2) + b"abc",  # a byte is left
        struct.pack("<I", 2**32 - 1) + b"abc",
        struct.pack("<I", 3) + b"abc" + struct.pack("<I", 0),  # two elements
        struct.pack("<I", 3) + b"abc" + struct.pack("<I", 1),
        b"abc",
        b"",
    ],
)
def test_a_text_whose_length_lies_is_refused(data: bytes) -> None:
    endpoint = Endpoint("one", (TensorSpec("text", "BYTES", 1),), ())
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(data)}}
    head = canonical_head(endpoint, json.dumps({"inputs": [tensor]}).encode(), len(data))
    with pytest.raises(
        ProtocolError, match="a tensor of one does not hold the elements that its shape says"
    ) as refused:
        decode_request(endpoint, head + data, len(head))
    assert refused.value.code is Code.INVALID


def test_no_tensor_bytes_cause_anything_but_a_refusal() -> None:
    """Mutations of the tensors behind a head that the front door has passed; every answer has the shapes of the head."""
    tensors = tensors_of_every_kind()
    whole, head_length = encode_request(ECHO, tensors)
    chance = random.Random(0)
    refused = []
    for _ in range(500):
        body = bytearray(whole)
        for _ in range(chance.randint(1, 4)):  # the texts come first
            place = chance.choice([chance.randrange(head_length, len(body)), head_length + chance.randrange(24)])
            body[place] = chance.choice([0, 1, 255, body[place] ^ 1 << chance.randrange(8)])
        try:
            decoded = decode_request(ECHO, bytes(body), head_length)
        except ProtocolError as error:
            refused.append(error.code)
        else:
            assert {name: each.shape for name, each in decoded.items()} == {
                name: each.shape for name, each in tensors.items()
            }
            assert encode_request(ECHO, decoded)[0] == bytes(body)
    assert 100 < len(refused) < 500 and set(refused) == {Code.INVALID}
