"""Malformed requests to the gateway of programs, seeded: `python -m tests.fuzz.gateway --requests 10000 --seed 1`, and one again
`--only 4711`.

Several sessions run at once, and every answer of the policy carries the mark of its session: nobody may ever read a mark of
another's, strangers none at all. After every batch the same process must give the same answers to good requests.
"""

import argparse
import asyncio
import hashlib
import json
import os
import re
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nemo_style_rlhf.agents.environment import Action, Task
from nemo_style_rlhf.agents.events import Called, Event
from nemo_style_rlhf.agents.gateway import Gateway
from nemo_style_rlhf.schema.common import TokenConfig
from nemo_style_rlhf.schema.gateway import GatewayConfig
from tests.fuzz.connection import LOST_ANSWER_BYTES, Outcome, attack_all, send
from tests.fuzz.fuzzer import MAX_REQUEST_BYTES, TOKEN, Random
from tests.fuzz.http_faults import (
    Attack,
    Wire,
    chunked,
    content_length,
    cut_off,
    encoded,
    flipped,
    huge_head,
    ignored_header,
    in_pieces,
    line_ends,
    method,
    odd_header,
    other_endpoint,
    other_protocol,
    pipelined,
    random_content,
    spliced,
    target,
    version,
    whole,
)
from tests.fuzz.kserve_faults import pick
from tests.support.agents import OFFER
from tests.support.paths import ROOT
from tests.support.processes import process_below

SESSIONS = 4
BATCH = 1000
STATUSES = {200, 204, 400, 401, 404, 405, 413, 429}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MARK = re.compile(rb"mark-(\d+)-of-a-session")
LEAKS = (b"Traceback", b'File "', b"site-packages", str(ROOT).encode(), TOKEN.encode())
FAULTS: list[Callable[[Wire, Random], Attack]] = [
    content_length, chunked, chunked, encoded, random_content, in_pieces, pipelined, pipelined, cut_off, cut_off, line_ends,
    odd_header, huge_head, ignored_header, target, other_endpoint, method, version, other_protocol, flipped, flipped, spliced,
    spliced,
]  # fmt: skip
USER = {"role": "user", "content": "hello"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
JUNK: list[Any] = [
    True, False, 0, -1, 1.5, 10**400, 2**70, "", "x", "\x00", "x" * 20_000, [], [[]], [None], {}, {"a": {}}, {"type": "json"},
]  # fmt: skip
TRUE = {"stream": [True, False], "logprobs": [True, False], "parallel_tool_calls": [True], "logit_bias": [{}],
        "stream_options": [{}, False, 0, "", []], "model": ["", "x", "\x00", "x" * 20_000, False, 0, [], {}],
        "tools": [[], False, 0, "", {}], "presence_penalty": [0], "frequency_penalty": [0],
        "top_logprobs": [0], "stop": ["x", "\x00", "x" * 20_000, []]}  # fmt: skip
"""Junk that is right, or may be, as the value of a field."""
FIELDS = ("temperature", "top_p", "n", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "max_tokens", "stop",
          "max_completion_tokens", "response_format", "tool_choice", "tools", "stream_options", "top_logprobs", "logprobs",
          "modalities", "parallel_tool_calls", "top_k", "best_of", "echo", "functions", "model", "stream")  # fmt: skip
MESSAGES: list[Any] = [
    None, 1, "x", [], {}, [1], [None], [[USER]], [{}], [{"role": "user"}], [{"role": ["user"], "content": "a"}],
    [{"role": "x", "content": "a"}], [{"role": "user", "content": 1}], [{"role": "user", "content": None}],
    [{"role": "user", "content": [1]}], [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc"}}]}],
    [USER, {"role": "assistant", "content": "a"}], [{**USER, "name": 5}], [{**USER, "tool_calls": []}], [USER, CALL],
    [{**CALL, "tool_calls": "x"}, USER], [{**CALL, "tool_calls": [1]}, USER], [{**CALL, "tool_calls": [{"function": {}}]}, USER],
    [{**CALL, "tool_calls": [{"function": {"name": 1, "arguments": "{}"}}]}, USER],
    [{**CALL, "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}, USER], [{**USER, "tool_call_id": []}],
]  # fmt: skip
RAW = [
    b"", b"{", b"[]", b"null", b"nan", b'"x"', b"1" * 5000, b'{"messages": NaN}', b"[" * 50_000, b'{"a":' * 5000, b"\xff\xfe",
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
    b'{"\\udfff": 1}', b'{"temperature": 1e999}', b'{"messages":' + b"[" * 65 + b"]" * 65 + b"}", b"\x00" * 30, b"-",
    b" " * (MAX_REQUEST_BYTES + 1), b'{"messages": [], "messages": []}',
]  # fmt: skip
ELSEWHERE = (
    "/", "/v1", "/v1/", "/v1/embeddings", "/v1/responses", "/v1/files", "/sessions", "/sessions/", "/sessions/next/1",
    "/v1//models",
    "/v1/chat/completions/", "/%761/models/../x", "/metrics", "/../../etc/passwd", "/static/x", "/sessions/0/reward",
    "/favicon.ico",
)  # fmt: skip


def wrong(draw: Random) -> tuple[str, bytes, set[int], str]:
    """Path, body, statuses and name of a request that must be refused, also with a right key."""
    kind = draw.integers(6)
    if kind == 0:
        return pick(draw, [CHAT, TEXT, "/sessions/reward"]), pick(draw, RAW), {400, 413}, "no object"
    if kind == 1:
        return CHAT, json.dumps({"messages": pick(draw, MESSAGES)}).encode(), {400}, "messages"
    if kind == 2:
        name = pick(draw, FIELDS)
        values = [value for value in JUNK if not any(value is each or value == each for each in TRUE.get(name, []))]
        body = {"messages": [USER], name: pick(draw, values)}
        refused = {400} if name not in ("n", "tool_choice", "echo", "best_of") else {400, 200}
        return CHAT, json.dumps(body).encode(), refused, name
    if kind == 3:
        prompt = pick(
            draw, [None, 1, True, {}, [], [[]], [-1], [2**31], [1.5], ["a", "b"], [1, "a"], [[1], [2]], [True], [None]]
        )
        return TEXT, json.dumps({"prompt": prompt}).encode(), {400}, "prompt"
    if kind == 4:
        rewards: list[Any] = [{"reward": True}, {"reward": "1"}, {"reward": None},
                   {"reward": 10**400}, {"rewards": 1}, {"reward": []},
                   {"reward": 1, "metrics": [1]}, {"reward": 1, "metrics": {"a": "b"}}, {"score": {}},
                   {"reward": 1, "x": 1}]  # fmt: skip
        return "/sessions/reward", json.dumps(pick(draw, rewards)).encode(), {400}, "reward"
    return pick(draw, ELSEWHERE), b"{}", {404}, "elsewhere"


def right(draw: Random) -> tuple[str, bytes]:
    """Path and body of a good request, which may be odd."""
    content = pick(
        draw,
        [
            "hello",
            "",
            "\x00",
            "é" * 5000,
            "\U0001f600",
            "</s>",
            "mark-0",
            "data: [DONE]\n\n",
            [{"type": "text", "text": "a"}],
        ],
    )
    more = pick(draw, [{}, {"stream": True}, {"n": 1, "temperature": 1, "top_p": 1.0}, {"max_tokens": 1, "stop": ["a", "b"]},
                       {"logprobs": True}, {"tools": [{"type": "function", "function": {"name": "f"}}]},
                       {"stream": True, "stream_options": {"include_usage": True}}])  # fmt: skip
    if draw.random() < 0.3:
        prompt = content if isinstance(content, str) else [1, 2, 3]
        return TEXT, json.dumps({"prompt": prompt, "stream": bool(draw.random() < 0.5)}).encode()
    return CHAT, json.dumps({"messages": [{"role": "user", "content": content}], **more}).encode()


@dataclass
class Shot:
    """An attack, and whose key it shows."""

    attack: Attack
    session: int | None
    """None: a stranger's."""
    statuses: set[int]
    certain: bool
    """Whether an answer with one of the statuses must come."""


def make(keys: list[str], seed: int, number: int) -> Shot:
    """Request ``number`` of a seed."""
    draw = np.random.default_rng([seed, number])
    session: int | None = int(draw.integers(len(keys)))
    is_wrong = draw.random() < 0.5
    if is_wrong:
        path, body, statuses, name = wrong(draw)
    else:
        (path, body), statuses, name = right(draw), {200}, "right"
    key = keys[session or 0]
    if draw.random() < 0.3:
        session = None
        key = pick(
            draw, ["", "wrong", key[:-1], key + "x", key.swapcase(), TOKEN, TOKEN[:-1], "\xff" * 8, f"{key}, {key}"]
        )
        statuses = {401, 404} if path in ELSEWHERE else {401}
    value = pick(draw, [b"Bearer "] * 9 + [b"bearer "]) + key.encode("latin1")
    headers = [(b"Host", b"gateway"), (b"Authorization", value), (b"Content-Length", b"%d" % len(body))]
    wire = Wire(path.encode(), headers, body, statuses)
    if is_wrong or draw.random() < 0.3:
        return Shot(replace(whole(wire), name=name), session, statuses, True)
    fault = pick(draw, FAULTS)
    attack = fault(wire, draw)
    certain = len(attack.pieces) > 0 and attack.ending == "wait" and fault in (in_pieces, ignored_header)
    ending = "wait" if attack.ending == "to the end" else attack.ending
    return Shot(replace(attack, name=fault.__name__, statuses=attack.statuses if certain else None, ending=ending), session,
                statuses | ({400} if fault is ignored_header else set()), certain)  # fmt: skip


def judge(shot: Shot, outcome: Outcome) -> str | None:
    """The fault of the outcome; None if it has none."""
    marks = {int(mark) for mark in MARK.findall(outcome.raw)}
    if marks - {shot.session}:
        return f"session {shot.session} read marks {marks}"
    if leaks := [leak for leak in LEAKS if leak in outcome.raw]:
        return f"an answer holds {leaks}"
    for status, body in outcome.answers:
        if status not in STATUSES:
            return f"status {status} with {body[:300]!r}"
        if status >= 400 and body and (problem := unclear(body)):
            return problem
    if not shot.certain:
        return None
    given = [status for status, _ in outcome.answers]
    if not given and outcome.closed and sum(map(len, shot.attack.pieces)) > LOST_ANSWER_BYTES:
        return None
    return None if given and given[0] in shot.statuses else f"answers {given}, expected one of {shot.statuses}"


def unclear(body: bytes) -> str | None:
    """The reason why a body is no error of the API."""
    try:
        error = json.loads(body)["error"]
        sound = error.keys() == {"message", "type", "param", "code"} and 5 < len(error["message"]) < 600
    except (ValueError, KeyError, TypeError, AttributeError):
        sound = False
    return None if sound else f"an error that is none of the API: {body[:300]!r}"


class Target:
    """A gateway with running sessions."""

    def __init__(self, folder: Path) -> None:
        token_file = folder / "token"
        token_file.write_text(TOKEN)
        token_file.chmod(0o600)
        self.log = folder / "gateway.log"
        config = GatewayConfig(token=TokenConfig(token_file=str(token_file)), max_request_bytes=MAX_REQUEST_BYTES)
        with errors_to(self.log):
            self._gateway = Gateway(config, self._answer, offer=OFFER, attempts=1, episode_timeout_s=36_000.0)
        self.port = self._gateway.port
        self._url = self._gateway.url
        for episode in range(SESSIONS):
            self._gateway.start(episode, Task("q", seed=episode))
        self.keys = [""] * SESSIONS
        for _ in range(SESSIONS):
            found = self._post("/sessions/next", TOKEN, {})
            self.keys[found["task"]["seed"]] = found["api_key"]
        self.process = process_below(os.getpid(), "gateway_process")

    def _answer(self, event: Event) -> None:
        """The policy: the mark of the session, and a digest of all that was asked."""
        assert isinstance(event, Called), event
        asked = json.dumps([event.prompt, event.tools, event.sampling])
        text = f"mark-{event.episode}-of-a-session {hashlib.sha256(asked.encode()).hexdigest()[:12]}"
        self._gateway.answer(event, Action(text, {"role": "assistant", "content": text}, (1, 2), (-0.5, -0.25)))

    def _post(self, path: str, key: str, body: object) -> Any:
        url = self._url.removesuffix("/v1") + path
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def answers(self) -> list[str]:
        """What good requests of every session read."""
        return [self._post(CHAT, key, {"messages": [USER]})["choices"][0]["message"]["content"] for key in self.keys]

    def close(self) -> None:
        self._gateway.close()


@contextmanager
def errors_to(path: Path) -> Iterator[None]:
    """Standard error of the processes that start meanwhile goes to a file."""
    kept = os.dup(2)
    with open(path, "wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


async def attack_with(target: Target, seed: int, numbers: range) -> Counter[str]:
    """:func:`attack_all` with the requests ``numbers`` of a seed."""

    async def attack(number: int) -> tuple[Attack, Outcome, str | None]:
        shot = make(target.keys, seed, number)
        outcome = await send(target.port, shot.attack)
        return shot.attack, outcome, judge(shot, outcome)

    return await attack_all(numbers, attack, f"python -m tests.fuzz.gateway --seed {seed} --only ")


def fuzz(folder: Path, *, seed: int, numbers: range) -> Counter[str]:
    """Send the requests ``numbers`` of a seed to a new gateway, and count the answers."""
    target, seen = Target(folder), Counter[str]()
    try:
        before = target.answers()
        assert [MARK.match(each.encode()) is not None and f"mark-{n}-" in each for n, each in enumerate(before)] == [
            True
        ] * SESSIONS
        for start in range(numbers.start, numbers.stop, BATCH):
            batch = range(start, min(start + BATCH, numbers.stop))
            print(f"seed {seed}, requests {batch.start}..{batch.stop - 1}", flush=True)
            seen += asyncio.run(attack_with(target, seed, batch))
            assert target.process.is_running() and target.answers() == before
            log = target.log.read_text()
            assert "Traceback" not in log and "ended with exit code" not in log, log[:4000]
    finally:
        target.close()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one request")
    arguments = parser.parse_args()
    numbers = range(arguments.requests) if arguments.only is None else range(arguments.only, arguments.only + 1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz_") as folder:
        seen = fuzz(Path(folder), seed=arguments.seed, numbers=numbers)
    took = time.monotonic() - began
    print(f"seed {arguments.seed}: {len(numbers)} requests in {took:.0f} s, nothing has changed; answers: {dict(seen)}")


if __name__ == "__main__":
    sys.exit(main())
