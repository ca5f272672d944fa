"""KServe v2 bodies with binary tensors, the format of Triton's HTTP endpoint: a JSON head, then the raw tensors.

https://github.com/kserve/open-inference-protocol and Triton's "binary data extension".
"""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from nemo_style_rlhf.wire.messages import DTYPES, Array, Code, Endpoint, ProtocolError, TensorSpec, text_tensor

HEAD_LENGTH_HEADER = "Inference-Header-Content-Length"
BINARY_ANSWERS = {"parameters": {"binary_data_output": True}}


def encode_request(
    endpoint: Endpoint, inputs: Mapping[str, Array], *, answers: Mapping[str, Any] = BINARY_ANSWERS
) -> tuple[bytes, int]:
    """The body of an inference request and the length of its JSON head."""
    heads, chunks = _encode(endpoint.inputs, inputs)
    head = _head(heads, answers)
    return b"".join([head, *chunks]), len(head)


def decode_response(body: bytes, head_length: int) -> dict[str, Array]:
    """The output tensors of an answer; FP32, INT32 and INT64 as read-only views into ``body``."""
    return _tensors_in(json.loads(body[:head_length])["outputs"], memoryview(body)[head_length:])


def decode_request(endpoint: Endpoint, body: bytes | bytearray, head_length: int) -> dict[str, Array]:
    """The input tensors of a request whose head :func:`canonical_head` wrote, as views into ``body``.

    Raises:
        ProtocolError: INVALID, the elements of a BYTES tensor do not match its shape.
    """
    try:
        inputs = _tensors_in(json.loads(body[:head_length])["inputs"], memoryview(body)[head_length:])
    except (ValueError, struct.error):
        _refuse(f"a tensor of {endpoint.name} does not hold the elements that its shape says")
    return inputs


def encode_response(
    endpoint: Endpoint, outputs: Mapping[str, Array], request: Mapping[str, Any]
) -> tuple[bytes, int | None]:
    """Encode the outputs that the request's head chooses, in binary or JSON. Return the body and the length of its JSON head, or
    None for the length if the body is all JSON.

    Raises:
        KeyError: an output is missing.
        TypeError: one has another datatype or rank.
    """
    binary = request["parameters"]["binary_data_output"]
    chosen = {each["name"]: each["parameters"]["binary_data"] for each in request.get("outputs", ())}
    heads: list[dict[str, Any]] = []
    chunks: list[bytes] = []
    for spec in endpoint.outputs:
        if (chosen and spec.name not in chosen) or (spec.optional and spec.name not in outputs):
            continue
        array = outputs[spec.name]
        if array.ndim != 1 or array.dtype != spec.dtype:
            raise TypeError(f"{spec.name} is {array.dtype} of rank {array.ndim}, expected {spec.datatype} of rank 1")
        if chosen.get(spec.name, binary):
            chunks.append(_raw(spec, array))
            heads.append(_head_of(spec, array.size, len(chunks[-1])))
        else:
            described = {"name": spec.name, "datatype": spec.datatype, "shape": [array.size], "data": _plain(array)}
            heads.append(described)
    head = json.dumps({"model_name": endpoint.name, "outputs": heads}, separators=(",", ":")).encode()
    return b"".join([head, *chunks]), len(head) if chunks else None


def _plain(array: Array) -> list[Any]:
    return [each.decode() if isinstance(each, bytes) else each for each in array.tolist()]


def _encode(specs: Sequence[TensorSpec], tensors: Mapping[str, Array]) -> tuple[list[dict[str, Any]], list[bytes]]:
    heads: list[dict[str, Any]] = []
    chunks: list[bytes] = []
    for spec in specs:
        array = tensors[spec.name]
        raw = _raw(spec, array)
        heads.append(_head_of(spec, array.size, len(raw)))
        chunks.append(raw)
    return heads, chunks


def _raw(spec: TensorSpec, array: Array) -> bytes:
    return _bytes_elements(array) if spec.datatype == "BYTES" else array.astype(spec.dtype, copy=False).tobytes()


def _tensors_in(described: Sequence[Mapping[str, Any]], data: memoryview) -> dict[str, Array]:
    tensors: dict[str, Array] = {}
    offset = 0
    for tensor in described:
        size = tensor["parameters"]["binary_data_size"]
        raw = data[offset : offset + size]
        offset += size
        flat = (
            _split_bytes(raw) if tensor["datatype"] == "BYTES" else np.frombuffer(raw, dtype=DTYPES[tensor["datatype"]])
        )
        tensors[tensor["name"]] = flat.reshape(tensor["shape"])
    return tensors


def _bytes_elements(array: Array) -> bytes:
    return b"".join(struct.pack("<I", len(element)) + element for element in array.ravel())


def _split_bytes(raw: memoryview) -> Array:
    elements: list[bytes] = []
    offset = 0
    while offset < len(raw):
        (size,) = struct.unpack_from("<I", raw, offset)
        if size > len(raw) - offset - 4:
            raise ValueError(f"an element of {size} bytes lies beyond the end of its tensor")
        elements.append(bytes(raw[offset + 4 : offset + 4 + size]))
        offset += 4 + size
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array


def canonical_head(endpoint: Endpoint, head: bytes, tensor_bytes: int) -> bytes:
    """Rewrite the JSON head of a request with binary tensors, so that it describes the tensors and nothing else.

    Args:
        head: the received head, without the tensors.
        tensor_bytes: number of bytes that follow the head.

    Raises:
        ProtocolError: INVALID, unless each input of the endpoint occurs once, with its datatype, rank 1 and all its bytes.
    """
    given = _object(head)
    inputs, total = [], 0
    for spec, tensor, size in _inputs(endpoint, given):
        nbytes = (
            tensor.get("parameters", {}).get("binary_data_size") if isinstance(tensor.get("parameters"), dict) else None
        )
        if type(nbytes) is not int or not 0 <= nbytes <= tensor_bytes:
            _refuse(f"{spec.name} has no binary_data_size within the body, or mixes binary tensors with JSON ones")
        if spec.datatype != "BYTES" and nbytes != size * np.dtype(spec.dtype).itemsize:
            _refuse(f"{spec.name} has shape [{size}] of {spec.datatype} but {nbytes} bytes")
        total += nbytes
        inputs.append(_head_of(spec, size, nbytes))
    if total != tensor_bytes:
        _refuse(f"the inputs of {endpoint.name} have {total} bytes but the body holds {tensor_bytes} of tensors")
    return _head(inputs, _answers(endpoint, given))


def binary_request(endpoint: Endpoint, body: bytes) -> tuple[bytes, int]:
    """Convert a request with JSON tensors to binary tensors: returns the body and the length of its head. The answer stays JSON.

    Raises:
        ProtocolError: INVALID, as in :func:`canonical_head`, or if the data does not have the datatype or shape.
    """
    given = _object(body)
    arrays = {}
    for spec, tensor, size in _inputs(endpoint, given):
        data = tensor.get("data")
        if not isinstance(data, list) or len(data) != size:
            _refuse(f"{spec.name} needs data, a flat list of {size} entries, or a binary_data_size")
        arrays[spec.name] = _array(spec, data)
    return encode_request(endpoint, arrays, answers=_answers(endpoint, given))


def _object(raw: bytes) -> dict[str, Any]:
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        _refuse("the request's head is not valid JSON")
    if not isinstance(content, dict):
        _refuse("the request's head is not a JSON object")
    return content


def _inputs(endpoint: Endpoint, given: dict[str, Any]) -> Iterator[tuple[TensorSpec, dict[str, Any], int]]:
    """Yield each input with its spec and size, in the order of the request and of the binary tensors."""
    tensors = given.get("inputs")
    specs = {spec.name: spec for spec in endpoint.inputs}
    if not isinstance(tensors, list) or not all(isinstance(tensor, dict) for tensor in tensors):
        _refuse(f'the request\'s head needs "inputs", a list of {", ".join(specs) or "none"}')
    names = [str(tensor.get("name"))[:50] for tensor in tensors]
    if sorted(names) != sorted(specs):
        given_names = ", ".join(names[: len(specs) + 3]) + (", ..." if len(names) > len(specs) + 3 else "")
        _refuse(f"the inputs of {endpoint.name} are {', '.join(specs) or 'none'}, given are {given_names or 'none'}")
    for name, tensor in zip(names, tensors, strict=True):
        spec, shape = specs[name], tensor.get("shape")
        if tensor.get("datatype") != spec.datatype:
            _refuse(f"{name} is {str(tensor.get('datatype'))[:20]}, expected {spec.datatype}")
        if not isinstance(shape, list) or len(shape) != 1 or type(shape[0]) is not int or not 0 <= shape[0] < 2**31:
            _refuse(f"{name} has shape {str(shape)[:50]}, expected [{spec.size or 'N'}]")
        if spec.size is not None and shape[0] != spec.size:
            _refuse(f"{name} has shape {shape}, expected [{spec.size}]")
        if spec.datatype == "BYTES" and shape[0] == 0:  # PyTriton cannot pass an empty tensor on
            _refuse(f"{name} is empty: send at least one text")
        yield spec, tensor, shape[0]


def _answers(endpoint: Endpoint, given: dict[str, Any]) -> dict[str, Any]:
    """The part of a head that selects the outputs, each as binary or JSON."""
    parameters = given.get("parameters")
    binary = isinstance(parameters, dict) and parameters.get("binary_data_output") is True
    answers: dict[str, Any] = {"parameters": {"binary_data_output": binary}}
    if "outputs" in given:
        known, outputs = [spec.name for spec in endpoint.outputs], given["outputs"]
        if not isinstance(outputs, list) or not all(
            isinstance(each, dict) and each.get("name") in known for each in outputs
        ):
            _refuse(f"the outputs of {endpoint.name} are {', '.join(sorted(known))}")
        wanted = {}
        for each in outputs:
            own = each.get("parameters")
            each_binary = own.get("binary_data") is True if isinstance(own, dict) and "binary_data" in own else binary
            wanted[each["name"]] = {"name": each["name"], "parameters": {"binary_data": each_binary}}
        answers["outputs"] = list(wanted.values())
    return answers


def _array(spec: TensorSpec, data: list[Any]) -> Array:
    expected = {"BYTES": (str,), "FP32": (int, float)}.get(spec.datatype, (int,))
    if not all(isinstance(entry, expected) and not isinstance(entry, bool) for entry in data):
        _refuse(f"{spec.name} holds other data than {spec.datatype}")
    try:
        array = text_tensor(data) if spec.datatype == "BYTES" else np.array(data, dtype=spec.dtype)
        if spec.datatype.startswith("INT") and array.tolist() != data:  # NumPy 1 wraps
            raise OverflowError
        return array
    except (OverflowError, UnicodeEncodeError):
        _refuse(f"{spec.name} holds data that does not fit into {spec.datatype}")


def _head_of(spec: TensorSpec, size: int, nbytes: int) -> dict[str, Any]:
    return {"name": spec.name, "shape": [size], "datatype": spec.datatype, "parameters": {"binary_data_size": nbytes}}


def _head(inputs: list[dict[str, Any]], answers: Mapping[str, Any]) -> bytes:
    return json.dumps({"inputs": inputs, **answers}, separators=(",", ":")).encode()


def _refuse(message: str) -> NoReturn:
    raise ProtocolError(Code.INVALID, message)
