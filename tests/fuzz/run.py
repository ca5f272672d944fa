"""Malformed requests to a real critic server, seeded: `make fuzz N=100000 SEED=1`, and one again `make fuzz SEED=1 ONLY=4711`.

Request n of a seed is the same bytes in every run, but for the lease and what TLS encrypts or draws itself. After every batch the
server must be what it was. With TLS=1 the server has a certificate, and a part of the requests breaks TLS itself.
"""

import argparse
import asyncio
import json
import re
import socket
import ssl
import struct
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from nemo_style_rlhf.critic_service.remote_critic import RemoteCritic
from nemo_style_rlhf.schema.common import TokenConfig
from nemo_style_rlhf.schema.remote_critic import ClientTlsConfig
from tests.fuzz.fuzzer import (
    JSON_CALLS,
    MAX_REQUEST_BYTES,
    MUTATIONS,
    TOKEN,
    Random,
    post,
    valid_infer,
    valid_json,
    valid_reward,
    valid_status,
    valid_train,
)
from tests.fuzz.http_faults import CLOSED, FAULTS, RARELY, REFUSED, Attack, Wire, stranger, whole
from tests.fuzz.kserve_faults import KSERVE_MUTATIONS, as_json, pick, send_json
from tests.fuzz.tls_faults import TLS_FAULTS, client_context
from tests.support.certificates import certificate
from tests.support.critic_server import KEPT_BYTES, TOKEN_ENV, CriticServer
from tests.support.models import save_reward_model
from tests.support.paths import ROOT

BATCH = 1000
AT_ONCE = 24
"""Number of connections; the door reserves room for 32 of the largest calls, so that no good request finds it full."""
ANSWER_S, SILENCE_S = 60.0, 0.25
"""Longest waits for an answer that must come, and for one that may or may not come."""
GOOD_ANSWER_S = 1.0
LOST_ANSWER_BYTES = 2**19
"""A client that still sends this much when the door ends the connection may lose the answer."""
TLS_SHARE = 0.25
"""Share of the requests to a server with a certificate that break TLS itself."""
PROBLEMS = 5
"""Number of problems after which a run ends."""
NOBODYS_LEASE = "nobody's"
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


def make(seed: int, number: int, lease: str, *, tls: bool = False) -> Attack:
    """Request ``number`` of a seed; ``tls`` is for a server with a certificate."""
    draw = np.random.default_rng([seed, number])
    if tls and draw.random() < TLS_SHARE:
        wire, fault = harmless(draw), pick(draw, TLS_FAULTS)
        attack = fault(stranger(wire, draw) if draw.random() < 0.3 else wire, draw)
        attack.name = fault.__name__
        return attack
    unknown = draw.random() < 0.3
    if draw.random() < 0.5:
        call = partial(valid_json, lease, int(draw.integers(JSON_CALLS)))
        raw = pick(draw, [valid_infer, partial(valid_train, lease), call, call, valid_reward, valid_status])()
        mutation = pick(draw, MUTATIONS + KSERVE_MUTATIONS)
        if not raw.tensors and mutation in MUTATIONS:  # there is no tensor to make wrong
            mutation = pick(draw, KSERVE_MUTATIONS)
        mutation(raw, draw)
        wire = Wire.of(raw, REFUSED | {401})
        attack, name = whole(stranger(wire, draw) if unknown else wire), f"{mutation.__name__} of {raw.model}"
    else:
        wire = harmless(draw)
        fault = RARELY if draw.random() < 0.004 else pick(draw, FAULTS)
        attack, name = fault(stranger(wire, draw) if unknown else wire, draw), f"{fault.__name__} at {wire.target!r}"
    attack.name = name + (" by a stranger" if attack.stranger else "")
    if attack.stranger and attack.statuses is not None:
        attack.statuses = [{400, 401} | (statuses & {CLOSED}) for statuses in attack.statuses]
    return attack


def harmless(draw: Random) -> Wire:
    """A correct request that changes nothing, or would change something but has no lease: any answer is accepted."""
    call = partial(valid_json, NOBODYS_LEASE, int(draw.integers(JSON_CALLS)))
    makers = [valid_infer, valid_infer, valid_reward, valid_status, partial(valid_train, NOBODYS_LEASE), call, call]
    chosen = int(draw.integers(len(makers)))
    raw = makers[chosen]()
    if draw.random() < 0.25:
        send_json(raw, json.dumps(as_json(raw)).encode())
    return Wire.of(raw, {200} if chosen < 4 else {400})


# --- one connection ---------------------------------------------------------------------------------------------------


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


# --- a run ------------------------------------------------------------------------------------------------------------

BEFORE, AFTER = "test-step_000001", "test-step_000002"
"""Ids of the checkpoints before and after the attacks."""


class Watch:
    """A server, and its state that must not change."""

    def __init__(self, server: CriticServer, critic: RemoteCritic, ca: str | None) -> None:
        self._server = server
        self._critic = critic
        self._post = partial(post, server, ca=ca)
        self._answers = self._good_answers()
        self._critic.save(BEFORE).result()
        self._status = critic.status()
        self._processes = {process.pid for process in server.processes()}
        self._kept = server.kept_bytes()

    def check(self) -> None:
        """Check the server after a batch.

        Raises:
            AssertionError: the server has changed.
        """
        log = self._server.log.read_text()
        assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:4000]
        assert {process.pid for process in self._server.processes()} == self._processes, log[-4000:]
        took = []
        for _ in range(3):  # the machine may be busy with other work
            began = time.monotonic()
            self._post(valid_infer())
            took.append(time.monotonic() - began)
        assert min(took) < GOOD_ANSWER_S, f"good requests are answered after {took} seconds"
        assert self._good_answers() == self._answers
        assert self._critic.status() == self._status
        deadline = time.monotonic() + 10
        while (more := self._server.kept_bytes() - self._kept) > KEPT_BYTES and time.monotonic() < deadline:
            time.sleep(0.2)
        assert more <= KEPT_BYTES, f"the server keeps {more / 2**20:.0f} MiB"
        print(f"{more / 2**20:.1f} MiB kept", flush=True)

    def check_weights(self) -> None:
        """Check at the end that weights, optimizer and schedule are equal to the bit, and that a train step succeeds."""
        after = self._critic.save(AFTER).result()
        assert self._server.checkpoint_digest(AFTER) == self._server.checkpoint_digest(BEFORE)
        lease = self._critic._require_lease()
        assert self._post(valid_train(lease, after["critic_step"] + 1)).status_code == 200

    def _good_answers(self) -> list[bytes]:
        return [self._post(valid()).content for valid in (valid_infer, valid_reward)]


async def attack_all(port: int, seed: int, numbers: range, lease: str, ca: str | None = None) -> Counter[str]:
    """Send the requests ``numbers``, many at a time, and count the answers.

    Raises:
        AssertionError: a request got a wrong answer, or none.
    """
    left, seen, problems = iter(numbers), Counter[str](), list[str]()
    tls = client_context(ca) if ca else None

    async def worker() -> None:
        for number in left:
            attack = make(seed, number, lease, tls=ca is not None)
            outcome = await send(port, attack, tls)
            problem = judge(attack, outcome, tls=ca is not None)
            if problem is not None:
                sent = b"".join(attack.pieces)[:1500]
                problems.append(
                    f"{attack.name}: {problem}\n  make fuzz SEED={seed} ONLY={number}{' TLS=1' if ca else ''}\n  sent: {sent!r}\n"
                    f"  received: {outcome.raw[:500]!r}"
                )
            if len(problems) >= PROBLEMS:
                return
            seen.update(str(status) for status, _ in outcome.answers)
            seen["none"] += not outcome.answers

    await asyncio.gather(*[worker() for _ in range(AT_ONCE)])
    assert not problems, "\n".join(problems)
    return seen


def fuzz(folder: Path, *, seed: int, numbers: range, tls: bool = False) -> Counter[str]:
    """Send the requests ``numbers`` of a seed to a new server below ``folder``, with a certificate if ``tls``, and count the
    answers."""
    token_file = folder / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    overrides = [f"server.max_request_bytes={MAX_REQUEST_BYTES}", "server.metrics=true"]
    ca = str(certificate(folder, "server")) if tls else None
    if ca:
        overrides += [f"server.tls.certificate={ca}", f"server.tls.key={folder / 'server.key'}"]
    model = save_reward_model(folder / "model", pad_token_id=0)
    server = CriticServer(folder / "server", model, overrides, {TOKEN_ENV: TOKEN})
    seen = Counter[str]()
    try:
        token = TokenConfig(token_file=str(token_file))
        with server.start().client(token=token, tls=ClientTlsConfig(ca=ca)) as critic:
            watch = Watch(server, critic, ca)
            for start in range(numbers.start, numbers.stop, BATCH):
                batch = range(start, min(start + BATCH, numbers.stop))
                print(f"seed {seed}, requests {batch.start}..{batch.stop - 1}: ", end="", flush=True)
                seen += asyncio.run(attack_all(server.port, seed, batch, critic._require_lease(), ca))
                watch.check()
            watch.check_weights()
    finally:
        server.close()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="the number of one request, or FIRST-LAST")
    parser.add_argument("--tls", action="store_true", help="attack a server with a certificate")
    arguments = parser.parse_args()
    numbers = range(arguments.requests)
    if arguments.only:
        first, _, last = arguments.only.partition("-")
        numbers = range(int(first), int(last or first) + 1)
    if len(numbers) == 1:
        print(make(arguments.seed, numbers.start, "the lease", tls=arguments.tls))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz_") as folder:
        seen = fuzz(Path(folder), seed=arguments.seed, numbers=numbers, tls=arguments.tls)
    took = time.monotonic() - began
    print(f"seed {arguments.seed}: {len(numbers)} requests in {took:.0f} s, nothing has changed; answers: {dict(seen)}")


if __name__ == "__main__":
    sys.exit(main())
