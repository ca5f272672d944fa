"""Malformed requests to a real critic server, seeded: `make fuzz N=100000 SEED=1`, and one again `make fuzz SEED=1 ONLY=4711`.
With TARGET=native they go to one without Triton, with TARGET=engine to a generation engine.

Request n of a seed is the same bytes in every run, but for the lease, the folder of the weights, and what TLS encrypts or draws
itself. After every batch the server must be what it was.
With TLS=1 the server has a certificate, and a part of the requests breaks TLS itself.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import psutil

from tests.fuzz.connection import Outcome, attack_all, judge, send
from tests.fuzz.critic import CriticCalls, CriticTarget
from tests.fuzz.engine import EngineCalls, EngineTarget
from tests.fuzz.fuzzer import MAX_REQUEST_BYTES, TOKEN, Random
from tests.fuzz.http_faults import CLOSED, RARELY, Attack, Wire, stranger, whole
from tests.fuzz.kserve_faults import pick
from tests.fuzz.tls_faults import TLS_FAULTS, client_context
from tests.support.certificates import certificate

BATCH = 1000
GOOD_ANSWER_S = 1.0
TLS_SHARE = 0.25
"""Share of the requests to a server with a certificate that break TLS itself."""


class Calls(Protocol):
    """The requests that a kind of server knows."""

    faults: list[Callable[[Wire, Random], Attack]]

    def wrong(self, draw: Random) -> tuple[Wire, str]: ...

    def harmless(self, draw: Random) -> Wire: ...


class Target(Protocol):
    """A server under attack, and what tells its state."""

    port: int
    log: Path
    calls: Calls
    kept_limit: int
    """Bytes that the attacks may make the server keep."""

    def processes(self) -> list[psutil.Process]: ...

    def kept_bytes(self) -> int: ...

    def status(self) -> object: ...

    def answers(self) -> list[bytes]: ...

    def check_at_end(self) -> None: ...

    def close(self) -> None: ...


CALLS: dict[str, Callable[[], Calls]] = {
    "critic": CriticCalls,
    "native": partial(CriticCalls, backend="native"),
    "engine": EngineCalls,
}
TARGETS: dict[str, Callable[[Path, list[str], Path, str | None], Target]] = {
    "critic": CriticTarget,
    "native": partial(CriticTarget, backend="native"),
    "engine": EngineTarget,
}


def make(calls: Calls, seed: int, number: int, *, tls: bool = False) -> Attack:
    """Request ``number`` of a seed; ``tls`` is for a server with a certificate."""
    draw = np.random.default_rng([seed, number])
    if tls and draw.random() < TLS_SHARE:
        wire, fault = calls.harmless(draw), pick(draw, TLS_FAULTS)
        attack = fault(stranger(wire, draw) if draw.random() < 0.3 else wire, draw)
        attack.name = fault.__name__
        return attack
    unknown = draw.random() < 0.3
    if draw.random() < 0.5:
        wire, name = calls.wrong(draw)
        attack = whole(stranger(wire, draw) if unknown else wire)
    else:
        wire = calls.harmless(draw)
        fault = RARELY if draw.random() < 0.004 else pick(draw, calls.faults)
        attack, name = fault(stranger(wire, draw) if unknown else wire, draw), f"{fault.__name__} at {wire.target!r}"
    attack.name = name + (" by a stranger" if attack.stranger else "")
    if attack.stranger and attack.statuses is not None:
        attack.statuses = [{400, 401} | (statuses & {CLOSED}) for statuses in attack.statuses]
    return attack


class Watch:
    """The state of a server, which must not change."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._answers, self._status = target.answers(), target.status()
        self._processes = {process.pid for process in target.processes()}
        self._kept = target.kept_bytes()

    def check(self) -> None:
        """Check the server after a batch.

        Raises:
            AssertionError: the server has changed.
        """
        log = self._target.log.read_text()
        assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:4000]
        assert {process.pid for process in self._target.processes()} == self._processes, log[-4000:]
        took = []
        for _ in range(3):  # the machine may be busy with other work
            began = time.monotonic()
            assert self._target.answers() == self._answers
            took.append(time.monotonic() - began)
        assert min(took) < GOOD_ANSWER_S, f"good requests are answered after {took} seconds"
        assert self._target.status() == self._status
        deadline = time.monotonic() + 10
        while (
            more := self._target.kept_bytes() - self._kept
        ) > self._target.kept_limit and time.monotonic() < deadline:
            time.sleep(0.2)
        assert more <= self._target.kept_limit, f"the server keeps {more / 2**20:.0f} MiB"
        print(f"{more / 2**20:.1f} MiB kept", flush=True)


async def attack_with(target: Target, kind: str, seed: int, numbers: range, ca: str | None = None) -> Counter[str]:
    """:func:`attack_all` with the requests ``numbers`` of a seed."""
    tls = client_context(ca) if ca else None

    async def attack(number: int) -> tuple[Attack, Outcome, str | None]:
        made = make(target.calls, seed, number, tls=ca is not None)
        outcome = await send(target.port, made, tls)
        return made, outcome, judge(made, outcome, tls=ca is not None)

    return await attack_all(numbers, attack, f"make fuzz SEED={seed}{' TLS=1' if ca else ''} TARGET={kind} ONLY=")


def fuzz(folder: Path, *, seed: int, numbers: range, tls: bool = False, kind: str = "critic") -> Counter[str]:
    """Send the requests ``numbers`` of a seed to a new server below ``folder``, with a certificate if ``tls``, and count the
    answers."""
    token_file = folder / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    settings = [f"server.max_request_bytes={MAX_REQUEST_BYTES}"]
    ca = str(certificate(folder, "server")) if tls else None
    if ca:
        settings += [f"server.tls.certificate={ca}", f"server.tls.key={folder / 'server.key'}"]
    target = TARGETS[kind](folder, settings, token_file, ca)
    seen = Counter[str]()
    try:
        watch = Watch(target)
        for start in range(numbers.start, numbers.stop, BATCH):
            batch = range(start, min(start + BATCH, numbers.stop))
            print(f"seed {seed}, requests {batch.start}..{batch.stop - 1}: ", end="", flush=True)
            seen += asyncio.run(attack_with(target, kind, seed, batch, ca))
            watch.check()
        target.check_at_end()
    finally:
        target.close()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="the number of one request, or FIRST-LAST")
    parser.add_argument("--tls", action="store_true", help="attack a server with a certificate")
    parser.add_argument("--target", choices=sorted(TARGETS), default="critic")
    arguments = parser.parse_args()
    numbers = range(arguments.requests)
    if arguments.only:
        first, _, last = arguments.only.partition("-")
        numbers = range(int(first), int(last or first) + 1)
    if len(numbers) == 1:
        print(make(CALLS[arguments.target](), arguments.seed, numbers.start, tls=arguments.tls))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz_") as folder:
        seen = fuzz(Path(folder), seed=arguments.seed, numbers=numbers, tls=arguments.tls, kind=arguments.target)
    took = time.monotonic() - began
    print(f"seed {arguments.seed}: {len(numbers)} requests in {took:.0f} s, nothing has changed; answers: {dict(seen)}")


if __name__ == "__main__":
    sys.exit(main())
