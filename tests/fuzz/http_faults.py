"""HTTP requests as bytes, and seeded ways to break everything but their content: framing, heads, targets, timing, hang-ups."""

import gzip
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from nemo_style_rlhf.wire import messages
from tests.fuzz.fuzzer import TOKEN, Random, Raw, valid_infer
from tests.fuzz.kserve_faults import pick

CLOSED = 0
"""Takes the place of a status: the door may end the connection without an answer."""
REFUSED = {400, 404, 405, 411, 413, 415, 503}
BAD = {400}
KNOWS_TOKEN = re.compile(rb"(?m)^(?i:x-critic-token):[ \t]*" + TOKEN.encode() + rb"[ \t]*\r?$")
PATHS = (
    "/", "/v2", "/v2/health/ready", "/v2/health/live", "/v2/models/critic_infer", "/v2/models/critic_infer/config",
    "/v2/models/critic_infer/ready", "/v2/models/critic_infer/stats", "/v2/models/stats", "/v2/repository/index",
    "/v2/repository/models/critic_infer/load", "/v2/repository/models/critic_infer/unload", "/v2/systemsharedmemory/status",
    "/v2/systemsharedmemory/region/x/register", "/v2/cudasharedmemory/status", "/v2/trace/setting", "/v2/logging",
    "/v2/models/critic_infer/trace/setting", "/v2/models/%63ritic_status/infer", "//v2/models/critic_status/infer",
    "/v2/models/critic_status/versions/1/infer", "/v2/models/critic_status/generate",
    "/v2/models/critic_status/generate_stream", "/v1/chat/completions", "/metrics/",
)  # fmt: skip
"""Paths at which nothing is served."""


@dataclass
class Wire:
    """One HTTP request, each part of which may be wrong."""

    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    right: set[int]
    """Allowed statuses of the answer, as long as this is a request at all."""
    method: bytes = b"POST"
    version: bytes = b"HTTP/1.1"
    line_end: bytes = b"\r\n"
    neighbor: Callable[[], Raw] = valid_infer
    """A request that the same server answers with 200."""

    @classmethod
    def of(cls, raw: Raw, right: set[int], neighbor: Callable[[], Raw] = valid_infer) -> "Wire":
        body, given = raw.body()
        lines = [(name.encode("latin1"), value.encode("latin1")) for name, value in given.items()]
        length = (b"Content-Length", b"%d" % len(body))
        target, headers = f"/v2/models/{raw.model}/infer".encode(), [(b"Host", b"critic"), *lines, length]
        return cls(target, headers, body, right, neighbor=neighbor)

    def encode(self) -> bytes:
        lines = [b" ".join([self.method, self.target, self.version])]
        lines += [name + b": " + value for name, value in self.headers]
        return self.line_end.join([*lines, b"", self.body])

    def without(self, name: bytes) -> list[tuple[bytes, bytes]]:
        return [(known, value) for known, value in self.headers if known.lower() != name.lower()]

    def with_headers(self, *headers: tuple[bytes, bytes]) -> "Wire":
        """The request with ``headers`` in place of all headers with the same names."""
        kept = self.headers
        for name, _ in headers:
            kept = replace(self, headers=kept).without(name)
        return replace(self, headers=[*kept, *headers])


@dataclass
class Attack:
    """All bytes that are sent over one connection."""

    pieces: list[bytes]
    statuses: list[set[int]] | None
    """Allowed statuses of the answers, in order. None: the requests may be complete or not, right or wrong."""
    pause_s: float = 0.0
    """Pause between pieces."""
    ending: str = "wait"
    """hang up, reset, or wait until there are as many answers as statuses; or "to the end", until the door ends it."""
    name: str = field(default="", compare=False)
    handshake: bool = True
    """Whether a TLS client shakes hands before it sends the pieces."""
    beneath: bytes = b""
    """Bytes that a TLS client sends in the end as they are, without encrypting them."""

    @property
    def stranger(self) -> bool:
        """Whether no line of the attack shows the token."""
        return not KNOWS_TOKEN.search(b"".join(self.pieces))


def whole(wire: Wire, statuses: set[int] | None = None) -> Attack:
    return Attack([wire.encode()], [wire.right if statuses is None else statuses])


def stranger(wire: Wire, draw: Random) -> Wire:
    """The same request without the token."""
    token = TOKEN.encode()
    given = pick(draw, [None, b"", b"wrong", token[:-3], token.upper(), b"'" + token + b"'", b"\xff" * 16])
    if given is None:
        return replace(wire, headers=wire.without(messages.TOKEN_HEADER.encode()), right={401})
    return replace(wire.with_headers((messages.TOKEN_HEADER.encode(), given)), right={401})


# --- lengths and encodings --------------------------------------------------------------------------------------------


def content_length(wire: Wire, draw: Random) -> Attack:
    size = len(wire.body)
    odd: list[bytes] = [
        b"-1", b"-%d" % size, b"+%d" % size, b"0x%x" % size, b"%d %d" % (size, size), b"%d;" % size, b"%d.0" % size, b"",
        b"1e3", b"\xb2", b"abc", b"9" * 30, b"%d,%d" % (size, size), b"%d, %d" % (size, size + 1), b"9" * 1000,
    ]  # fmt: skip
    name = b"Content-Length"
    kind = draw.integers(8)
    if kind == 0:
        return whole(replace(wire, headers=wire.without(name)), {411})
    if kind == 1:  # twice
        second = pick(draw, [b"%d" % size, b"%d" % (size + 7), b"0"])
        return whole(replace(wire, headers=[*wire.headers, (name, second)]), {411})
    if kind == 2:
        return whole(wire.with_headers((name, pick(draw, [b"%d" % 10**17, b"%d" % 10**10, b"%d" % 2**31]))), {413})
    if kind == 3:
        return whole(wire.with_headers((name, pick(draw, [b"  %d\t " % size, b"0000%d" % size]))))
    if kind == 4:
        return Attack([wire.with_headers((name, b"%d" % (size + draw.integers(1, 1000)))).encode()], None)
    if kind == 5:
        return whole(wire.with_headers((name, b"%d" % draw.integers(0, size))), REFUSED)
    return whole(wire.with_headers((name, pick(draw, odd))), {411})


def chunked(wire: Wire, draw: Random) -> Attack:
    """Send right or wrong chunks, with or without a Content-Length, followed by bytes that must not pass as a request."""
    size = int(pick(draw, [1, 7, 1000]))
    chunks = [b"%x\r\n%s\r\n" % (len(part), part) for part in sliced(wire.body, size)] + [b"0\r\n\r\n"]
    where = int(draw.integers(len(chunks)))
    wrong: list[bytes] = [
        b"-1\r\n\r\n", b"g\r\n", b"0x5\r\n12345\r\n", b"f" * 40 + b"\r\n", b"5 \r\n12345\r\n", b"5;a=b\r\n12345\r\n", b"\r\n",
        b"0\r\nx-critic-token: " + TOKEN.encode() + b"\r\n\r\n", b"5\r\n123", b"0\r\n", b"5\n12345\n", b"+5\r\n12345\r\n", b"",
        b"7fffffffffffffff\r\n", b"5;" + b"x" * 3000 + b"\r\n12345\r\n",
    ]  # fmt: skip
    chunks[where] = pick(draw, [chunks[where], *wrong])
    odd = [b"Chunked", b"gzip, chunked", b"chunked, chunked", b"identity", b"xchunked", b"", b"chunked;q=1"]
    coding = pick(draw, odd) if draw.random() < 0.5 else b"chunked"
    name = pick(draw, [b"Transfer-Encoding", b"transfer-encoding"])
    headers = wire.without(b"Content-Length") if draw.random() < 0.6 else wire.headers
    headers = [*headers, *[(name, coding)] * int(pick(draw, [1, 1, 2]))]
    smuggled = Wire.of(wire.neighbor(), {200}).encode()
    sent = replace(wire, headers=headers, body=b"".join(chunks)).encode() + (smuggled if draw.random() < 0.5 else b"")
    refused = {401} if wire.right == {401} else {411}  # a token in a trailer does not count
    return Attack([sent], [refused], ending=pick(draw, ["to the end", "wait", "wait", "wait"]))


def encoded(wire: Wire, draw: Random) -> Attack:
    coding, body = pick(draw, [
        (b"gzip", gzip.compress(wire.body)), (b"deflate", zlib.compress(wire.body)), (b"gzip", wire.body), (b"br", wire.body),
        (b"gzip", gzip.compress(bytes(2**20))), (b"identity, gzip", gzip.compress(wire.body)), (b"x" * 500, wire.body),
    ])  # fmt: skip
    headers = (b"Content-Encoding", coding), (b"Content-Length", b"%d" % len(body))
    return whole(replace(wire, body=body).with_headers(*headers), {415})


def random_content(wire: Wire, draw: Random) -> Attack:
    types = [b"application/x-www-form-urlencoded", b"multipart/form-data; boundary=x", b"text/plain", b"\xff"]
    wire = wire.with_headers((b"Content-Type", pick(draw, types)))
    return whole(replace(wire, body=draw.bytes(len(wire.body))), REFUSED)


# --- timing and sequence ----------------------------------------------------------------------------------------------


def sliced(content: bytes, size: int) -> list[bytes]:
    return [content[start : start + size] for start in range(0, len(content), size)]


def in_pieces(wire: Wire, draw: Random) -> Attack:
    return replace(whole(wire), pieces=sliced(wire.encode(), int(pick(draw, [1, 2, 50, 300]))))


def slow(wire: Wire, draw: Random) -> Attack:
    sent = wire.encode()
    return replace(whole(wire), pieces=sliced(sent, len(sent) // 4 + 1), pause_s=float(draw.uniform(0.05, 0.5)))


def pipelined(wire: Wire, draw: Random) -> Attack:
    """Send several requests at once: right ones, some without the token, some to unknown paths. A refusal ends the connection,
    and requests under way at that moment may cause the loss of earlier answers."""
    known = (messages.TOKEN_HEADER.encode(), TOKEN.encode())
    good = Wire.of(wire.neighbor(), {200})
    lost = Wire(pick(draw, PATHS).encode(), [(b"Host", b"critic"), known], b"", {404}, method=b"GET")
    kinds = [good, lost, stranger(lost, draw), stranger(good, draw), wire]
    requests = [pick(draw, kinds) for _ in range(draw.integers(2, 7))]
    all_right = all(request.right == {200} for request in requests)
    statuses = [request.right | (set() if all_right else {CLOSED}) for request in requests]
    sent = b"".join(request.encode() for request in requests)
    return Attack(sliced(sent, int(pick(draw, [len(sent), 100, 700]))), statuses)


def cut_off(wire: Wire, draw: Random) -> Attack:
    """Send a part of the request, or all of it, without waiting for the answer."""
    sent = wire.encode()
    ending = pick(draw, ["hang up", "reset", "wait"])
    return Attack([sent[: draw.integers(len(sent) + 1)]], None, ending=ending)


# --- heads ------------------------------------------------------------------------------------------------------------


def line_ends(wire: Wire, draw: Random) -> Attack:
    sent = replace(wire, line_end=pick(draw, [b"\n", b"\r", b"\r\r\n", b"\n\r", b"\r\n \r\n", b"\0"])).encode()
    return Attack([pick(draw, [sent, b"\r\n" * 3 + wire.encode(), b"\n" * 500 + wire.encode()])], None)


def odd_header(wire: Wire, draw: Random) -> Attack:
    """Add a line that is no header."""
    lines = [
        b"x-a: b\r\n  folded", b"\tx: y", b" Transfer-Encoding: chunked", b"x-a: b\0c", b"x\0a: b", b"no colon", b": no name",
        b"Transfer-Encoding : chunked", b"x a: b", b"x-\xff: b", b"x-a: \x01", b"x-a: \x1b[31m", b"x-a\x0b: b", b"(x): y",
        b"x-critic-token : " + TOKEN.encode(), b"x-a: \x7f",
    ]  # fmt: skip
    start, _, rest = wire.encode().partition(b"\r\n")
    return Attack([start + b"\r\n" + pick(draw, lines) + b"\r\n" + rest], [BAD])


def huge_head(wire: Wire, draw: Random) -> Attack:
    long = b"a" * int(draw.integers(17_000, 100_000))
    more: list[list[tuple[bytes, bytes]]] = [
        [(b"x-a", long)], [(long, b"b")], [(b"x-a", b"b")] * 3000, [(b"x-%d" % number, b"") for number in range(3000)],
        [(b"Content-Type", b"," * 17_000)], [(messages.BOOT_HEADER.encode(), long)],
    ]  # fmt: skip
    if draw.random() < 0.2:
        return whole(replace(wire, target=wire.target + b"?" + long), {CLOSED} | BAD)
    return whole(replace(wire, headers=[*pick(draw, more), *wire.headers]), {CLOSED} | BAD)


def token_lines(wire: Wire, draw: Random) -> Attack:
    """Send the token beside a wrong one, in another place, or in another form."""
    name, token = messages.TOKEN_HEADER.encode(), TOKEN.encode()
    bare = wire.without(name)
    lines: list[list[tuple[bytes, bytes]]] = [
        [(name, token), (name, token)], [(name, b"wrong"), (name, token)], [(name, token), (name, b"")],
        [(b"Authorization", b"Bearer " + token)], [(b"x_critic_token", token)], [(b"triton-access-token", token)],
        [(b"Cookie", name + b"=" + token)], [(name, b"Bearer " + token)], [(name, token + b"\xa0")], [(name, token * 2)],
    ]  # fmt: skip
    return whole(replace(wire, headers=[*bare, *pick(draw, lines)]), {401})


def ignored_header(wire: Wire, draw: Random) -> Attack:
    """Ask for a feature that the door does not offer; the answer must be the usual one."""
    headers = pick(draw, [
        [(b"Expect", b"100-continue")], [(b"Expect", b"200-ok")], [(b"Range", b"bytes=0-5")], [(b"Accept-Encoding", b"gzip")],
        [(b"Upgrade", b"h2c"), (b"Connection", b"Upgrade, HTTP2-Settings"), (b"HTTP2-Settings", b"AAMAAABkAAQ")],
        [(b"Upgrade", b"websocket"), (b"Connection", b"Upgrade"), (b"Sec-WebSocket-Key", b"dGhlIHNhbXBsZSBub25jZQ==")],
        [(b"Connection", b"close")], [(b"X-HTTP-Method-Override", b"GET")], [(b"X-Forwarded-For", b"127.0.0.1")],
        [(b"Host", b"a b\xff")], [(b"X-Original-URL", b"/v2/repository/index")], [(b"Trailer", b"x-critic-token")],
        [(b"triton-request-parameter", b"{")], [(b"x-critic-" + b"a" * 3000, b"\xff")],
    ])  # fmt: skip
    return whole(wire.with_headers(*headers))


# --- targets, methods, protocols --------------------------------------------------------------------------------------


def target(wire: Wire, draw: Random) -> Attack:
    path = wire.target
    targets = [
        b"http://critic" + path, b"https://127.0.0.1:1" + path, b"/" + path, path + b"/", path + b"?x=y", path + b"#x",
        path + b";x", path + b"%00", path.replace(b"/v2", b"/./v2"), path.replace(b"/v2", b"/x/../v2"), path.upper(), b"*",
        path.replace(b"infer", b"%69nfer"), path.replace(b"/models", b"%2fmodels"), path[1:], b"critic:443", b"/" + b"a" * 9000,
        path + b"\xff", path.replace(b"/", b"\\"), b"/..%2f..%2fetc/passwd", b"/v2/models//infer", b"?",
    ]  # fmt: skip
    return whole(replace(wire, target=pick(draw, targets)), BAD | {404})


def other_endpoint(wire: Wire, draw: Random) -> Attack:
    method = pick(draw, [b"GET", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"PATCH", b"TRACE"])
    return whole(replace(wire, target=pick(draw, PATHS).encode(), method=method), {404})


def metrics(wire: Wire, draw: Random) -> Attack:
    """Ask for metrics, which are served with the token; a body has no meaning."""
    wire = replace(wire, target=b"/metrics", method=b"GET", body=b"" if draw.random() < 0.5 else wire.body)
    wire = wire.with_headers((b"Content-Length", b"%d" % len(wire.body)))
    return whole(wire, {200})


def method(wire: Wire, draw: Random) -> Attack:
    right = b"GET PUT DELETE OPTIONS PATCH TRACE CONNECT HEAD PRI post POSTX".split() + [b"A" * 5000]
    wrong = [b"", b"P OST", b"\0", b"P\xffST", b"POST\t", b"(POST)", b'"POST"']
    if draw.random() < 0.6:
        return whole(replace(wire, method=pick(draw, right)), {405})
    return whole(replace(wire, method=pick(draw, wrong)), BAD)


def version(wire: Wire, draw: Random) -> Attack:
    if draw.random() < 0.3:
        return whole(replace(wire, version=pick(draw, [b"HTTP/1.0", b"HTTP/1.9"])))
    odd = [
        b"HTTP/2.0",
        b"HTTP/0.9",
        b"HTTP/3",
        b"",
        b"http/1.1",
        b"HTTP/1",
        b"HTTP/11.1",
        b"HTTP/-1.1",
        b"HTTP/1.1 x",
        b"ICY",
    ]
    return whole(replace(wire, version=pick(draw, odd)), BAD)


def other_protocol(wire: Wire, draw: Random) -> Attack:
    """Speak HTTP/2 with prior knowledge, TLS, SSH, HTTP/0.9, or noise."""
    hello = b"\x16\x03\x01\x00\xc8\x01\x00\x00\xc4\x03\x03" + draw.bytes(32) + b"\x20" + draw.bytes(160)
    openings = [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00", hello, b"SSH-2.0-OpenSSH_9.9\r\n", b"GET /\r\n",
        b"\r\n" * 300, draw.bytes(int(draw.integers(1, 3000))), b"\0" * 20_000, b"GET /metrics\r\n\r\n", b"\x80\x2e\x01\x00\x02",
    ]  # fmt: skip
    return Attack([pick(draw, openings) + (wire.encode() if draw.random() < 0.3 else b"")], None)


# --- noise ------------------------------------------------------------------------------------------------------------


def flipped(wire: Wire, draw: Random) -> Attack:
    sent = bytearray(wire.encode())
    for _ in range(draw.integers(1, 9)):
        sent[draw.integers(len(sent))] ^= 1 << int(draw.integers(8))
    return Attack([bytes(sent)], None)


def spliced(wire: Wire, draw: Random) -> Attack:
    """Lose a stretch of the request, double it, replace it by noise, or send it later."""
    sent = wire.encode()
    first, second = sorted(int(draw.integers(len(sent) + 1)) for _ in range(2))
    before, stretch, after = sent[:first], sent[first:second], sent[second:]
    middle = pick(draw, [b"", stretch * 2, draw.bytes(len(stretch)), draw.bytes(5) + stretch])
    return Attack([pick(draw, [before + middle + after, before + after + stretch])], None)


FAULTS: list[Callable[[Wire, Random], Attack]] = [
    content_length, content_length, chunked, chunked, encoded, random_content, in_pieces, pipelined, pipelined, cut_off, cut_off,
    line_ends, odd_header, huge_head, token_lines, ignored_header, target, other_endpoint, metrics, method, version,
    other_protocol, flipped, flipped, flipped, spliced, spliced,
]  # fmt: skip
RARELY = slow
"""An attack that takes seconds."""
