"""Messages from the network have known fields and exact types; what is wrong is one sentence that names the field."""

import json
import tracemalloc
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

from nemo_style_rlhf.wire.messages import Code, ProtocolError, bytes_tensor, text_tensor
from nemo_style_rlhf.wire.reading import LARGEST_BYTES, Expected, Fault, Many, parse, read


@dataclass(frozen=True)
class Order:
    name: Annotated[str, Expected("a short name", lambda value: len(value) < 5)]
    count: Annotated[int, Expected("a whole number")] = 1
    prices: Annotated[Many[float] | None, Expected("a list of numbers")] = None
    sizes: Annotated[Many[int], Expected("a list of whole numbers")] = field(default_factory=list)


def order(**fields: Any) -> Order:
    return read(bytes_tensor(json.dumps(fields).encode()), Order, "order")


def test_what_is_right_arrives_with_its_types_and_defaults() -> None:
    assert order(name="a") == Order("a")
    assert order(name="a", count=2, prices=[1, 0.5], sizes=[3, 4]) == Order("a", 2, [1.0, 0.5], [3, 4])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "order.name is missing"),
        ({"name": 3}, "order.name is 3, expected a short name"),
        ({"name": "longer"}, 'order.name is "longer", expected a short name'),
        ({"name": "a", "count": True}, "order.count is true, expected a whole number"),
        ({"name": "a", "count": 1.0}, "order.count is 1.0, expected a whole number"),
        ({"name": "a", "count": "1"}, 'order.count is "1", expected a whole number'),
        ({"name": "a", "count": None}, "order.count is null, expected a whole number"),
        ({"name": "a", "prices": [1, "2"]}, 'order.prices is [1, "2"], expected a list of numbers'),
        ({"name": "a", "prices": [float("nan")]}, "order.prices is [NaN], expected a list of numbers"),
        ({"name": "a", "prices": [float("inf")]}, "order.prices is [Infinity], expected a list of numbers"),
        ({"name": "a", "sizes": [[1]]}, "order.sizes is [[1]], expected a list of whole numbers"),
        ({"name": "a", "sizes": [*range(99), "x"]}, "order.sizes is [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16"),
        ({"colour": 1}, "order has the unknown field 'colour', expected name, count, prices, sizes"),
        ({"name": "a", "": 1}, "order has the unknown field '', expected name, count, prices, sizes"),
        ({"name": 3, "n" * 99: 1}, f"order has the unknown field '{'n' * 50}', expected name, count, prices, sizes"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ProtocolError) as refused:
        order(**fields)
    assert refused.value.code is Code.INVALID and refused.value.message.startswith(sentence)


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (b"{", "order is not valid JSON"),
        (b"\xff\xfe", "order is not valid JSON"),
        (b"[" * 100_000, "order is not valid JSON"),
        (b"[]", "order is not a JSON object"),
        (b'"name"', "order is not a JSON object"),
        (b" " * (LARGEST_BYTES + 1), f"order has {LARGEST_BYTES + 1} bytes, expected at most {LARGEST_BYTES}"),
    ],
    ids=["half", "no text", "deep", "list", "string", "large"],
)
def test_what_is_no_object_is_refused(raw: bytes, sentence: str) -> None:
    with pytest.raises(ProtocolError) as refused:
        read(bytes_tensor(raw), Order, "order")
    assert refused.value.message == sentence


@pytest.mark.parametrize("raw", [b'{"count": %s}' % (b"9" * 5000), b'{"name": "a", "count": %s}' % (b"9" * 5000)])
def test_a_number_of_thousands_of_digits_is_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolError, match="order"):
        read(bytes_tensor(raw), Order, "order")


def test_several_texts_are_no_message() -> None:
    with pytest.raises(ProtocolError, match=r"order has shape \[2\], expected \[1\]"):
        read(text_tensor(["{}", "{}"]), Order, "order")


def test_a_message_with_a_million_faults_takes_no_more_memory_than_one_with_a_million_numbers() -> None:
    """Each fault that a library lists takes hundreds of bytes."""
    given = {"name": "a", "prices": [""] * 10**6, "sizes": [""] * 10**6}
    tracemalloc.start()
    try:
        for fault in (given, {"name": "a", "sizes": [[1]] * 10**6}, {str(number): 1 for number in range(10**5)}):
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            with pytest.raises(Fault):
                parse(fault, Order)
            assert tracemalloc.get_traced_memory()[1] - before < 20_000_000
    finally:
        tracemalloc.stop()


def test_a_wrong_value_at_any_depth_is_refused() -> None:
    """At some depth it can be read, but not written into a sentence."""
    for depth in range(850, 1000):
        with pytest.raises(ProtocolError) as refused:
            read(bytes_tensor(b'{"name": ' + b"[" * depth + b"]" * depth + b"}"), Order, "order")
        assert refused.value.code is Code.INVALID
