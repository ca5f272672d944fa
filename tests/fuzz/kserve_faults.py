"""Seeded ways to make the KServe part of a valid request wrong: its JSON head, the lengths around it, its tensors' bytes."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from nemo_style_rlhf.wire import messages
from nemo_style_rlhf.wire.kserve import HEAD_LENGTH_HEADER
from tests.fuzz.fuzzer import DATATYPES, Random, Raw, bad_json

DEEPEST = 200_000
ODD: list[Any] = [
    None, True, -1, 0.5, 2**31, 2**63, 2**64, 10**4000, "", "x", "\u0000", "\ud800", "y" * 5000, [], {}, [[]], [None],
]  # fmt: skip
"""JSON values of every kind, none of which is a valid name, datatype, shape or size."""


def pick(draw: Random, options: Any) -> Any:
    return options[draw.integers(len(options))]


def as_json(raw: Raw) -> dict[str, Any]:
    """The same request with its tensors as JSON."""
    content = raw.kserve()
    for tensor, (datatype, _, content_bytes) in zip(content["inputs"], raw.tensors.values(), strict=True):
        tensor.pop("parameters")
        if datatype == "BYTES":
            data, offset = [], 0
            while offset < len(content_bytes):
                end = offset + 4 + int.from_bytes(content_bytes[offset : offset + 4], "little")
                data.append(content_bytes[offset + 4 : end].decode())
                offset = end
            tensor["data"] = data
        else:
            tensor["data"] = np.frombuffer(content_bytes, DATATYPES[datatype]).tolist()
    content["parameters"]["binary_data_output"] = False
    return content


def send_json(raw: Raw, content: bytes) -> None:
    """Make ``content`` the whole body."""
    raw.tensors = {}
    raw.head = content
    raw.headers[HEAD_LENGTH_HEADER] = None


# --- every mutation makes a request wrong -----------------------------------------------------------------------------


def odd_entry(raw: Raw, draw: Random) -> None:
    """Replace a name, a datatype, a shape, a size or a tensor in the head."""
    content = raw.kserve()
    place = pick(draw, ["name", "datatype", "shape", "parameters", "size", "extent", "tensor", "inputs"])
    if place == "inputs" or not content["inputs"]:
        content["inputs"] = pick(draw, [odd for odd in ODD if odd != []])  # an empty list is what critic_status has
    elif place == "tensor":
        content["inputs"][draw.integers(len(content["inputs"]))] = pick(draw, ODD)
    else:
        tensor = pick(draw, content["inputs"])
        if place == "size":
            tensor["parameters"]["binary_data_size"] = pick(draw, ODD)
        elif place == "extent":
            tensor["shape"] = pick(draw, [[odd] for odd in ODD] + [[2**62, 4], [2**32, 2**32], [-1, -4], [1] * 5000])
        else:
            tensor[place] = pick(draw, ODD)
    raw.head = json.dumps(content).encode()


def wrong_binary_size(raw: Raw, draw: Random) -> None:
    """Make each tensor's bytes overlap the next one's, leave some unclaimed, or reach beyond the body."""
    content = raw.kserve()
    if not content["inputs"]:
        return odd_entry(raw, draw)
    parameters = pick(draw, content["inputs"])["parameters"]
    parameters["binary_data_size"] += int(pick(draw, [-1, 1, -4, 4, 2**31, 2**32, 2**63, -(2**63)]))
    raw.head = json.dumps(content).encode()
    return None


def repeated_tensor(raw: Raw, draw: Random) -> None:
    content = raw.kserve()
    if not content["inputs"]:
        return odd_entry(raw, draw)
    content["inputs"] += [pick(draw, content["inputs"])] * int(pick(draw, [1, 2, 300]))
    raw.head = json.dumps(content).encode()
    return None


def shared_memory(raw: Raw, draw: Random) -> None:
    """Ask Triton to read a tensor from memory that the request names."""
    content = raw.kserve()
    if not content["inputs"]:
        return odd_entry(raw, draw)
    region = pick(draw, ["x", "../../etc/passwd", "/dev/shm/x", "", None, 5])
    sizes = {"shared_memory_byte_size": pick(draw, [0, 16, 2**63]), "shared_memory_offset": pick(draw, [0, -1, 2**63])}
    pick(draw, content["inputs"])["parameters"] = {"shared_memory_region": region, **sizes}
    raw.head = json.dumps(content).encode()
    return None


def wrong_outputs(raw: Raw, draw: Random) -> None:
    content = raw.kserve()
    output = pick(draw, [{"name": odd} for odd in ODD] + [5, None, [], "values", {}, {"name": "error"}])
    content["outputs"] = pick(draw, [[output], [output] * 100, {"name": "values"}, 1, None, "values"])
    raw.head = json.dumps(content).encode()


def repeated_key(raw: Raw, _: Random) -> None:
    raw.head = json.dumps(raw.kserve()).encode()[:-1] + b',"inputs":[{}]}'


def deep(raw: Raw, draw: Random) -> None:
    """Send JSON nested up to 200,000 deep, with or without its end."""
    depth = int(10 ** draw.uniform(1, np.log10(DEEPEST)))
    opening, closing = pick(draw, [(b"[", b"]"), (b'{"a":', b"}")])
    start = pick(draw, [b'{"inputs":', b'{"inputs":[{"name":', b'{"inputs":[],"outputs":[{"name":', b""])
    nested = start + opening * depth + b"1" + closing * depth * int(pick(draw, [0, 1]))
    nested += {b"": b"", b'{"inputs":': b"}"}.get(start, b"}]}")
    if draw.random() < 0.5:
        raw.head = nested
    else:
        send_json(raw, nested)


def wrong_head_length(raw: Raw, draw: Random) -> None:
    body, headers = raw.body()
    right = int(headers[HEAD_LENGTH_HEADER])
    wrong = [right - 1, right + 1, len(body) + 1, 0, -1, -right, 2**31, 2**63, 2**64, 10**30]
    odd = ["", "+5", f"+{right}", f"{right} {right}", f"{right},{right}", "0x10", "1e3", f"{right}.0", "abc", "\u00b2"]
    chosen = draw.integers(len(wrong) + len(odd))
    raw.headers[HEAD_LENGTH_HEADER] = odd[chosen] if chosen < len(odd) else str(wrong[chosen - len(odd)])


def wrong_text_lengths(raw: Raw, draw: Random) -> None:
    """Change the lengths before each text in a BYTES tensor."""
    names = [name for name, (datatype, _, _) in raw.tensors.items() if datatype == "BYTES"]
    if not names:
        return odd_entry(raw, draw)
    name = pick(draw, names)
    datatype, shape, content = raw.tensors[name]
    length = int.from_bytes(content[:4], "little")
    other = pick(draw, [0, length - 1, length + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32 - 4])
    raw.tensors[name] = datatype, shape, other.to_bytes(4, "little") + content[4:]
    return None


def wrong_data(raw: Raw, draw: Random) -> None:
    """Change an entry of a tensor that is sent as JSON."""
    content = as_json(raw)
    if not content["inputs"]:
        return odd_entry(raw, draw)
    tensor = pick(draw, content["inputs"])
    where = int(draw.integers(len(tensor["data"])))
    odd = [
        None,
        True,
        [1],
        {},
        "\ud800",
        2**32 + 5,
        -(2**63),
        2**64,
        10**400,
        10**4000,
        0.5,
        float("nan"),
        float("inf"),
        "x",
    ]
    if tensor["datatype"] == "BYTES":
        odd = [entry for entry in odd if entry != "x" or tensor["name"] not in ("prompts", "responses")]
    if tensor["datatype"] == "FP32":
        odd = [entry for entry in odd if not isinstance(entry, int | float) or entry != entry or abs(entry) > 10**300]
    if tensor["datatype"] == "INT64":
        odd = [entry for entry in odd if type(entry) is not int or entry >= 2**63]
    if draw.random() < 0.8:
        tensor["data"][where] = pick(draw, odd)
    else:
        tensor["data"] = pick(draw, [tensor["data"][:-1], tensor["data"] + tensor["data"][:1], None, 5, {}, "x", [[]]])
    send_json(raw, json.dumps(content).encode())
    return None


def odd_boot_id(raw: Raw, draw: Random) -> None:
    odd = ["\u00ff\u00fe", "\u00e9", '"', "\\", "\\u0000", "{", "a\tb", "%00", "b" * 5000]
    raw.headers[messages.BOOT_HEADER] = pick(draw, odd)


def random_bytes(raw: Raw, draw: Random) -> None:
    """Send random bytes in place of the head, or of the whole body."""
    junk = draw.bytes(int(draw.integers(0, 2000)))
    if draw.random() < 0.5:
        raw.head = junk
    else:
        send_json(raw, junk)


def truncated_json(raw: Raw, draw: Random) -> None:
    content = json.dumps(as_json(raw)).encode() if draw.random() < 0.5 else b""
    if content:
        send_json(raw, content[: draw.integers(len(content))])
    elif not raw.tensors:
        return odd_entry(raw, draw)
    else:
        bad_json(raw, draw)
    return None


KSERVE_MUTATIONS: list[Callable[[Raw, Random], None]] = [
    odd_entry, wrong_binary_size, repeated_tensor, shared_memory, wrong_outputs, repeated_key, deep, wrong_head_length,
    wrong_text_lengths, wrong_data, odd_boot_id, random_bytes, truncated_json,
]  # fmt: skip
