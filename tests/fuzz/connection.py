"""One attack over one connection, and the judgement of what came back."""

import asyncio
import json
import re
import socket
import ssl
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.fuzz.fuzzer import TOKEN
from tests.fuzz.http_faults import CLOSED, REFUSED, Attack
from tests.support.paths import ROOT

AT_ONCE = 24
"""Number of connections; the door reserves room for 32 of the largest calls, so that no good request finds it full."""
PROBLEMS = 5
"""Number of problems after which a run ends."""
ANSWER_S, SILENCE_S = 60.0, 0.25
"""Longest waits for an answer that must come, and for one that may or may not come."""
LOST_ANSWER_BYTES = 2**19
"""A client that still sends this much when the door ends the connection may lose the answer."""
REFUSAL_BY_DOOR = re.compile(
    rb"HTTP/1\.1 401 Unauthorized\r\nContent-Type: application/json\r\nContent-Length: \d+\r\n"
    rb"(Connection: (close|Keep-Alive)\r\n)?\r\n"
    rb'(\{"error": "\[unauthorized\] the header x-critic-token is (missing|wrong)"\})?|HTTP/1\.1 400 Bad Request\r\n\r\n'
)
"""The only answers that a stranger gets; those to HEAD have no sentence."""
SENTENCE = re.compile(
    r"\[(invalid|lease_lost|wrong_step|conflict|not_found|restarted|stopping|unauthorized)\] .{5,600}"
    r"|(\[request id: <id_unknown>\] )?(incomplete|expected|unexpected) .{5,100} for inference input .{5,300}",  # Triton's own
    re.DOTALL,
)
LEAKS = ("Traceback", 'File "', "site-packages", "/tmp", str(ROOT), TOKEN)


class Link(asyncio.Protocol):
    """Collects the received bytes, even if the connection is then reset."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.closed = False
        self._news = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self.received += data
        self._news.set()

    def connection_lost(self, _: Exception | None) -> None:
        self.closed = True
        self._news.set()
        self._writable.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def room(self) -> None:
        await self._writable.wait()

    async def more(self, timeout_s: float) -> bool:
        """Whether data or the end of the connection came within the time."""
        self._news.clear()
        if self.closed:
            return False
        try:
            await asyncio.wait_for(self._news.wait(), timeout_s)
        except TimeoutError:
            return False
        return True


@dataclass
class Outcome:
    """Result of an attack."""

    raw: bytes
    answers: list[tuple[int, bytes]]
    """Status and body of each answer; interim answers (100) are left out."""
    closed: bool
    """Whether the door ended the connection."""


def answers_in(raw: bytes, *, bodiless: bool) -> list[tuple[int, bytes]]:
    """The complete answers at the start of ``raw``; those to HEAD are ``bodiless``."""
    answers: list[tuple[int, bytes]] = []
    while match := re.match(rb"HTTP/1\.1 (\d{3}) (.*?)\r\n\r\n", raw, re.DOTALL):
        raw = raw[match.end() :]
        length = re.search(rb"(?i)\r\ncontent-length: (\d+)", match[0])
        size = int(length[1]) if length and not bodiless else 0
        if b"Transfer-Encoding: chunked" in match[0]:
            size = raw.find(b"0\r\n\r\n") + 5
            if size < 5:
                break
        if size > len(raw):
            break
        if match[1] != b"100":
            answers.append((int(match[1]), raw[:size]))
        raw = raw[size:]
    return answers


async def send(port: int, attack: Attack, tls: ssl.SSLContext | None = None) -> Outcome:
    """
    Args:
        tls: the client's context for a server with a certificate.
    """
    loop = asyncio.get_running_loop()
    plain, link = await loop.create_connection(Link, "127.0.0.1", port)
    if attack.ending == "reset":
        plain.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport: asyncio.Transport | None = plain
    if tls is not None and attack.handshake:
        transport = await loop.start_tls(plain, link, tls, server_hostname="127.0.0.1")
    assert transport is not None
    bodiless = attack.pieces[0].startswith(b"HEAD ")

    def outcome() -> Outcome:
        raw = bytes(link.received)
        return Outcome(raw, answers_in(raw, bodiless=bodiless), link.closed)

    try:
        for piece in attack.pieces:
            if link.closed:
                break
            transport.write(piece)
            await link.room()
            if len(attack.pieces) > 1:
                await asyncio.sleep(attack.pause_s)
        plain.write(attack.beneath)
        if attack.ending in ("hang up", "reset"):
            return outcome()
        deadline = time.monotonic() + (SILENCE_S if attack.statuses is None else ANSWER_S)
        wanted = 1 if attack.statuses is None else len(attack.statuses)
        while attack.ending == "to the end" or len(outcome().answers) < wanted:
            if not await link.more(deadline - time.monotonic()):
                break
        return outcome()
    finally:
        transport.abort()


def judge(attack: Attack, outcome: Outcome, *, tls: bool = False) -> str | None:
    """The fault of the outcome; None if it has none."""
    answers = outcome.answers
    if tls and not attack.handshake:
        return f"an answer without a handshake: {outcome.raw[:300]!r}" if b"HTTP" in outcome.raw else None
    if attack.stranger:
        left = REFUSAL_BY_DOOR.sub(b"", outcome.raw)
        if left and not outcome.closed and attack.statuses is None:
            left = b""  # an answer that has not ended in time
        if left:
            return f"a stranger read {left[:300]!r}"
    for status, body in answers:
        if status != 200 and (problem := unclear(status, body)):
            return problem
    if attack.statuses is None:
        return None
    if attack.ending == "to the end" and not outcome.closed:
        return "the door keeps a connection that it should have ended"
    given = [status for status, _ in answers]
    if not given and outcome.closed and sum(map(len, attack.pieces)) > LOST_ANSWER_BYTES:
        return None
    for number, allowed in enumerate(attack.statuses):
        if number >= len(given):
            if CLOSED in allowed and outcome.closed:
                break
            return f"{len(given)} answers {given}, expected {attack.statuses}; {'closed' if outcome.closed else 'still open'}"
        if given[number] not in allowed:
            return f"answers {given}, expected {attack.statuses}"
    if [status for status in given[len(attack.statuses) :] if status != 400]:
        return f"answers {given}, which are too many for {attack.statuses}"
    return None


def unclear(status: int, body: bytes) -> str | None:
    """The reason why an error is not one clear sentence without secrets; errors of HTTP itself have no sentence."""
    if not body and status in (400, 401, 405):  # the last two for HEAD
        return None
    try:
        sentence = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return f"status {status} with {body[:300]!r}"
    leaks = [leak for leak in LEAKS if leak in sentence]
    if status not in REFUSED | {401} or leaks or not SENTENCE.fullmatch(sentence):
        return f"status {status} with the sentence {sentence[:1000]!r}"
    return None


async def attack_all(
    numbers: range, attack: Callable[[int], Awaitable[tuple[Attack, Outcome, str | None]]], again: str
) -> Counter[str]:
    """Send requests, many at a time, and count the answers.

    Args:
        attack: sends the request of a number; returns it, what came back, and what is wrong with that.
        again: the command that sends one of them again, up to its number.

    Raises:
        AssertionError: a request got a wrong answer, or none.
    """
    left, seen, problems = iter(numbers), Counter[str](), list[str]()

    async def worker() -> None:
        for number in left:
            sent, outcome, problem = await attack(number)
            if problem is not None:
                problems.append(
                    f"{sent.name}: {problem}\n  {again}{number}\n  sent: {b''.join(sent.pieces)[:1500]!r}\n"
                    f"  received: {outcome.raw[:500]!r}"
                )
            if len(problems) >= PROBLEMS:
                return
            seen.update(str(status) for status, _ in outcome.answers)
            seen["none"] += not outcome.answers

    await asyncio.gather(*[worker() for _ in range(AT_ONCE)])
    assert not problems, "\n".join(problems)
    return seen
