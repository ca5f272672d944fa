"""Seeded ways to speak TLS wrongly: no handshake, half of one, one that leads to nothing, and noise after it."""

import ssl
from collections.abc import Callable
from dataclasses import replace

from tests.fuzz.fuzzer import Random
from tests.fuzz.http_faults import Attack, Wire, sliced
from tests.fuzz.kserve_faults import pick


def client_context(ca: str | None = None) -> ssl.SSLContext:
    """A client's context that trusts the certificate ``ca``."""
    return ssl.create_default_context(cafile=ca)


def hello() -> bytes:
    """The first message of a handshake; its random numbers are OpenSSL's own."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    link = client_context().wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    try:
        link.do_handshake()
    except ssl.SSLWantReadError:
        return outgoing.read()
    raise AssertionError("no handshake ends before the server has answered")


def in_the_open(sent: bytes, draw: Random) -> Attack:
    """Send bytes without a handshake, at once or in pieces."""
    size = int(pick(draw, [max(len(sent), 1), 100, 5]))
    ending = pick(draw, ["hang up", "reset", "wait"])
    return Attack(sliced(sent, size) or [b""], None, ending=ending, handshake=False)


def plain_http(wire: Wire, draw: Random) -> Attack:
    return in_the_open(wire.encode(), draw)


def half_a_hello(_: Wire, draw: Random) -> Attack:
    sent = hello()
    return in_the_open(sent[: draw.integers(len(sent))], draw)


def flipped_hello(_: Wire, draw: Random) -> Attack:
    sent = bytearray(hello())
    for _flip in range(draw.integers(1, 9)):
        sent[draw.integers(len(sent))] ^= 1 << int(draw.integers(8))
    return in_the_open(bytes(sent), draw)


def hello_and_more(wire: Wire, draw: Random) -> Attack:
    """Send a right hello, and then no answer to the server's but noise, another hello, an alert, or plain HTTP."""
    alert, too_long = b"\x15\x03\x03\x00\x02\x02\x28", b"\x16\x03\x03\xff\xff" + draw.bytes(20_000)
    more = [b"", draw.bytes(int(draw.integers(1, 3000))), hello(), alert, too_long, wire.encode()]
    return in_the_open(hello() + pick(draw, more), draw)


def noise(_: Wire, draw: Random) -> Attack:
    openings = [b"", b"\x16\x03\x01", b"\x80\x2e\x01\x00\x02", b"\x16\x03\x01\x00\x00" * 1000, b"\0" * 20_000]
    return in_the_open(pick(draw, openings) + draw.bytes(int(draw.integers(0, 3000))), draw)


def silence(_: Wire, draw: Random) -> Attack:
    """Shake hands, and ask for nothing."""
    return Attack([b""], None, ending=pick(draw, ["hang up", "reset", "wait"]))


def beneath(wire: Wire, draw: Random) -> Attack:
    """Shake hands, send a part of the request or nothing, and then bytes that are not encrypted."""
    sent = wire.encode()
    record = b"\x17\x03\x03\x01\x00" + draw.bytes(256)
    bare = pick(draw, [sent, record, draw.bytes(100), b"\x15\x03\x03\x00\x02\x02\x28", hello(), b"\0" * 20_000])
    begun = Attack([sent[: draw.integers(len(sent))]], None, ending=pick(draw, ["hang up", "reset", "wait"]))
    return replace(begun, beneath=bare)


TLS_FAULTS: list[Callable[[Wire, Random], Attack]] = [
    plain_http, half_a_hello, flipped_hello, hello_and_more, noise, silence, beneath,
]  # fmt: skip
