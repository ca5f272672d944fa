"""Valid requests to the critic server as bytes, and seeded ways to make them, and those to an engine, wrong."""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import requests

from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.wire import messages
from nemo_style_rlhf.wire.kserve import HEAD_LENGTH_HEADER
from tests.support.critic_server import VOCABULARY

Random = np.random.Generator
TOKEN = "a-shared-secret"
MAX_REQUEST_BYTES = 65536
JSON_CALLS = 5
DATATYPES = {
    "INT32": np.int32,
    "INT64": np.int64,
    "FP32": np.float32,
    "FP64": np.float64,
    "UINT8": np.uint8,
    "BYTES": None,
}


@dataclass
class Raw:
    """A request as bytes, so that every part of it can be made wrong."""

    model: str
    tensors: dict[str, tuple[str, list[int], bytes]]
    """name: (datatype, shape, raw content)."""
    headers: dict[str, str | None] = field(default_factory=dict)
    """Headers in addition to, or instead of, those that the body needs; None removes one."""
    cut: int = 0
    """Number of bytes missing at the end of the body."""
    head: bytes | None = None
    """Replacement of the JSON head."""

    def kserve(self) -> dict[str, Any]:
        """The JSON head, before :attr:`head` replaces it."""
        inputs = [
            {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(raw)}}
            for name, (datatype, shape, raw) in self.tensors.items()
        ]
        return {"inputs": inputs, "parameters": {"binary_data_output": True}}

    def body(self) -> tuple[bytes, dict[str, str]]:
        head = json.dumps(self.kserve()).encode() if self.head is None else self.head
        body = b"".join([head, *(raw for _, _, raw in self.tensors.values())])
        headers = {messages.TOKEN_HEADER: TOKEN, HEAD_LENGTH_HEADER: str(len(head)), **self.headers}
        kept = {name: value for name, value in headers.items() if value is not None}
        return body[: len(body) - self.cut], kept


class Listening(Protocol):
    port: int


def post(server: Listening, raw: Raw, *, ca: str | None = None) -> requests.Response:
    """The answer to ``raw``; over TLS if ``ca`` names the file with the server's certificate."""
    body, headers = raw.body()
    url = f"{'https' if ca else 'http'}://127.0.0.1:{server.port}/v2/models/{raw.model}/infer"
    return requests.post(url, data=body, headers=headers, timeout=60, verify=ca)


def tensor(array: np.ndarray, datatype: str) -> tuple[str, list[int], bytes]:
    return datatype, list(array.shape), array.astype(DATATYPES[datatype]).tobytes()


def text(*contents: str | bytes) -> tuple[str, list[int], bytes]:
    raws = [content.encode() if isinstance(content, str) else content for content in contents]
    return "BYTES", [len(raws)], b"".join(struct.pack("<I", len(raw)) + raw for raw in raws)


def valid_status() -> Raw:
    return Raw("critic_status", {})


def valid_sequences() -> dict[str, tuple[str, list[int], bytes]]:
    return {"tokens": tensor(np.array([5, 6, 7, 8]), "INT32"), "sequence_lengths": tensor(np.array([1, 3]), "INT32")}


def valid_infer() -> Raw:
    return Raw("critic_infer", valid_sequences() | {"request": text(json.dumps({"want": "both"}))})


def valid_reward() -> Raw:
    texts = {"prompts": text("w1 w2", "w3"), "responses": text("w4", "w5 w6")}
    return Raw("reward_infer", texts | {"conversations": tensor(np.array([0]), "INT32")})


def valid_train(lease: str, step: int = 1) -> Raw:
    raw = Raw("critic_train", valid_sequences())
    arrays = (
        np.array([5, 6, 7, 8], np.int32),
        np.array([1, 3], np.int32),
        np.zeros(4, np.float32),
        np.zeros(4, np.float32),
        np.array([0, 1, 1, 0], np.float32),
    )
    for name, array in zip(("returns", "old_values", "mask"), arrays[2:], strict=True):
        raw.tensors[name] = tensor(array, "FP32")
    plan = protocol.part_plan(lease=lease, step=step, part=1, parts=[arrays], mini_batches=[[0, 1]], normalizers=[2.0])
    raw.tensors["plan"] = text(json.dumps(plan))
    return raw


def valid_json(lease: str, number: int) -> Raw:
    model, content = [
        ("critic_save", {"lease": lease, "checkpoint_id": "test-step_000003"}),
        ("critic_commit", {"lease": lease, "checkpoint_id": "test-step_000003", "keep": 2}),
        ("critic_restore", {"lease": lease, "checkpoint_id": "test-step_000003"}),
        ("critic_acquire", {"run_id": "fuzz", "tokenizer_digest": "of another tokenizer"}),
        ("critic_shutdown", {"lease": lease}),
    ][number]
    return Raw(model, {"request": text(json.dumps(content))})


# --- every mutation makes a request wrong -----------------------------------------------------------------------------


def wrong_token(raw: Raw, random: Random) -> None:
    raw.headers[messages.TOKEN_HEADER] = str(random.choice(["", "wrong", TOKEN + "x", TOKEN[:-1], "\x7f"]))


def wrong_boot(raw: Raw, _: Random) -> None:
    raw.headers[messages.BOOT_HEADER] = "0123456789abcdef"


def wrong_dtype(raw: Raw, random: Random) -> None:
    name = str(random.choice(list(raw.tensors)))
    datatype, shape, _ = raw.tensors[name]
    other = str(random.choice([known for known in DATATYPES if known not in (datatype, "BYTES")]))
    raw.tensors[name] = tensor(np.ones(shape), other)


def wrong_rank(raw: Raw, random: Random) -> None:
    name = str(random.choice(list(raw.tensors)))
    datatype, shape, content = raw.tensors[name]
    shapes: list[list[int]] = [[1, *shape], [*shape, 1], [-1]]
    raw.tensors[name] = datatype, shapes[random.integers(len(shapes))], content


def wrong_size(raw: Raw, random: Random) -> None:
    name = str(random.choice(list(raw.tensors)))
    datatype, shape, content = raw.tensors[name]
    raw.tensors[name] = datatype, [shape[0] + int(random.choice([-1, 1, 1000, 2**40]))], content


def wrong_name(raw: Raw, random: Random) -> None:
    name = str(random.choice(list(raw.tensors)))
    raw.tensors[name + "x"] = raw.tensors.pop(name)


def missing_tensor(raw: Raw, random: Random) -> None:
    raw.tensors.pop(str(random.choice(list(raw.tensors))))


def unknown_model(raw: Raw, random: Random) -> None:
    raw.model = str(random.choice(["critic", "critic_infer2", "..", "critic_infer%2f.."]))


def truncated(raw: Raw, random: Random) -> None:
    raw.cut = int(random.integers(1, 4))


def broken_head(raw: Raw, random: Random) -> None:
    choices = [
        b"",
        b"{",
        b"null",
        b"[]",
        b'{"inputs": 1}',
        b'{"inputs": [1]}',
        bytes(random.integers(0, 256, 30, np.uint8)),
    ]
    raw.head = choices[random.integers(len(choices))]


def oversized(raw: Raw, random: Random) -> None:
    if "prompts" in raw.tensors:
        raw.tensors["prompts"] = text("w3", b"w" * MAX_REQUEST_BYTES)
    for name in ("tokens", "request"):
        if name in raw.tensors:
            size = 17 * 2**20 if name == "request" and random.random() < 0.02 else MAX_REQUEST_BYTES
            raw.tensors[name] = text(b" " * size) if name == "request" else tensor(np.full(size, 3), "INT32")


def bad_texts(raw: Raw, random: Random) -> None:
    if "prompts" not in raw.tensors:
        return bad_sequences(raw, random)
    raw.tensors |= [
        {"prompts": text("w1")},
        {"responses": text("w1", "w2", "w3")},
        {"prompts": text()},
        {"prompts": text(), "responses": text()},
        {"prompts": text("w1", b"\xff")},
        {"responses": text(b"w1 \xc3", "w2")},
        {"responses": text("\ud800".encode("utf-8", "surrogatepass"), "w2")},
        {"responses": text("w1", "w2 " * 128)},
        {"conversations": tensor(np.array([2]), "INT32")},
        {"conversations": tensor(np.array([0, 1]), "INT32")},
        {"conversations": tensor(np.array([1]), "INT32")},
        conversations('{"messages": []}', "[1, 2]"),
        conversations('{"messages": [{"role": "user"}]}', '{"messages": [{"role": "user", "content": 3}]}'),
        conversations(f'{{"messages": {"[" * 5000}{"]" * 5000}}}', '{"messages": [{"role": 1, "content": "w1"}]}'),
        conversations('{"messages": [{"role": "user", "content": "w1"}], "tools": 3}', "null"),
    ][random.integers(15)]
    return None


def conversations(*prompts: str) -> dict[str, tuple[str, list[int], bytes]]:
    return {"prompts": text(*prompts), "conversations": tensor(np.array([1]), "INT32")}


def bad_sequences(raw: Raw, random: Random) -> None:
    if "prompts" in raw.tensors:
        return bad_texts(raw, random)
    if "tokens" not in raw.tensors:
        return bad_json(raw, random)
    tokens, lengths = [
        ([5, 6, 7, VOCABULARY], [1, 3]),
        ([5, 6, -1, 8], [1, 3]),
        ([2**31 - 1, 6, 7, 8], [1, 3]),
        ([5, 6, 7, 8], [1, 2]),
        ([5, 6, 7, 8], [2, 3]),
        ([5, 6, 7, 8], [0, 4]),
        ([5, 6, 7, 8], [-1, 5]),
        ([5, 6, 7, 8], [2**31 - 1, 2**31 - 1]),
        ([5] * 129, [129]),
        ([], []),
        ([5, 6, 7, 8], []),
        ([], [4]),
    ][random.integers(12)]
    raw.tensors["tokens"] = tensor(np.array(tokens), "INT32")
    raw.tensors["sequence_lengths"] = tensor(np.array(lengths), "INT32")


def bad_numbers(raw: Raw, random: Random) -> None:
    if "mask" not in raw.tensors:
        return bad_sequences(raw, random)
    name = str(random.choice(["returns", "old_values", "mask"]))
    value = float(random.choice([np.nan, np.inf, -np.inf]))
    content = np.zeros(4)
    content[random.integers(4)] = value
    choices = [(name, content), ("mask", [0, 0.5, 1, 0]), ("mask", [0, 1, 1, 1]), ("mask", [0, 0, 0, 0])]
    name, content = choices[random.integers(len(choices))]
    raw.tensors[name] = tensor(np.array(content), "FP32")


def bad_json(raw: Raw, random: Random) -> None:
    name = "plan" if "plan" in raw.tensors else "request"
    if name not in raw.tensors:
        return bad_sequences(raw, random)
    content = json.loads(raw.tensors[name][2][4:])
    key = str(random.choice(list(content)))
    wrong: list[Any] = [None, [], {}, "", "../../etc", True, -1, 0, 1.5, 2**70, [[0.5]], [[[]]], "x" * 300, "\u0000"]
    mutation = random.integers(5)
    if mutation == 0:
        content.pop(key)
    elif mutation == 1:
        content["surplus"] = 1
    elif mutation == 2:
        value = wrong[random.integers(len(wrong))]
        may_be = (
            value is None or isinstance(value, bool) or (key, value) in (("keep", 0), ("sampling", {}))
        )  # a right value of the key
        content[key] = ["wrong type"] if may_be else value
    elif mutation == 3:
        broken = [
            "",
            "{",
            "[]",
            "null",
            "nan",
            '{"a": NaN}',
            "[" * 5000,
            "1" * 5000,
            "\ud800".encode("utf-8", "surrogatepass"),
        ]
        raw.tensors[name] = text(broken[random.integers(len(broken))])
        return None
    else:
        content["lease" if "lease" in content else key] = "stale"
    raw.tensors[name] = text(json.dumps(content))
    return None


def bad_plan(raw: Raw, random: Random) -> None:
    if "plan" not in raw.tensors:
        return bad_json(raw, random)
    plan = json.loads(raw.tensors["plan"][2][4:])
    plan |= [
        {"step": 2},
        {"step": 2**60},
        {"part": 0},
        {"part": 2},
        {"parts": 0},
        {"parts": 2**20, "part": 2**20},
        {"part": 1, "parts": 2},
        {"digest": "0" * 64},
        {"mini_batches": [[0, 2]]},
        {"mini_batches": [[-1]]},
        {"mini_batches": []},
        {"mini_batches": [[]]},
        {"mini_batches": [[0, 0]]},
        {"normalizers": [0]},
        {"normalizers": [-1]},
        {"normalizers": [1, 1]},
        {"normalizers": ["1"]},
        {"normalizers": [10**400]},
    ][random.integers(18)]
    raw.tensors["plan"] = text(json.dumps(plan))
    return None


MUTATIONS: list[Callable[[Raw, Random], None]] = [
    wrong_token,
    wrong_boot,
    wrong_dtype,
    wrong_rank,
    wrong_size,
    wrong_name,
    missing_tensor,
    unknown_model,
    truncated,
    broken_head,
    oversized,
    bad_sequences,
    bad_texts,
    bad_numbers,
    bad_json,
    bad_plan,
]
