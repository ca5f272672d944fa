"""Bodies of requests and answers; heads that the front door must refuse, in one short sentence, before Triton sees them."""

import json

import numpy as np
import pytest

from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.transport.kserve import binary_request, canonical_head, decode_response, encode_request
from nemo_style_rlhf.transport.messages import ProtocolError
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
