"""KServe v2 bodies with binary tensors, as Triton's HTTP endpoint speaks them: a JSON head, then the raw tensors.

https://github.com/kserve/open-inference-protocol and Triton's "binary data extension".
"""

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from nemo_style_rlhf.critic_service.protocol import DTYPES, Array, Endpoint

HEAD_LENGTH_HEADER = "Inference-Header-Content-Length"


def encode_request(endpoint: Endpoint, inputs: Mapping[str, Array]) -> tuple[bytes, int]:
    """The body of an inference request and the length of its JSON head."""
    heads: list[dict[str, Any]] = []
    chunks: list[bytes] = []
    for spec in endpoint.inputs:
        array = inputs[spec.name]
        raw = _bytes_elements(array) if spec.datatype == "BYTES" else array.astype(spec.dtype, copy=False).tobytes()
        parameters = {"binary_data_size": len(raw)}
        heads.append(
            {"name": spec.name, "shape": list(array.shape), "datatype": spec.datatype, "parameters": parameters}
        )
        chunks.append(raw)
    head = json.dumps({"inputs": heads, "parameters": {"binary_data_output": True}}, separators=(",", ":")).encode()
    return b"".join([head, *chunks]), len(head)


def decode_response(body: bytes, head_length: int) -> dict[str, Array]:
    """The output tensors of an answer; FP32, INT32 and INT64 as read-only views into ``body``."""
    head = json.loads(body[:head_length])
    outputs: dict[str, Array] = {}
    offset = head_length
    for output in head["outputs"]:
        size = output["parameters"]["binary_data_size"]
        raw = memoryview(body)[offset : offset + size]
        offset += size
        if output["datatype"] == "BYTES":
            flat = _split_bytes(raw)
        else:
            flat = np.frombuffer(raw, dtype=DTYPES[output["datatype"]])
        outputs[output["name"]] = flat.reshape(output["shape"])
    return outputs


def _bytes_elements(array: Array) -> bytes:
    return b"".join(struct.pack("<I", len(element)) + element for element in array.ravel())


def _split_bytes(raw: memoryview) -> Array:
    elements: list[bytes] = []
    offset = 0
    while offset < len(raw):
        (size,) = struct.unpack_from("<I", raw, offset)
        elements.append(bytes(raw[offset + 4 : offset + 4 + size]))
        offset += 4 + size
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array
