"""Reward functions that do everything wrong, HTTP endpoints that do too, and how a scorer's answer is read."""

import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from nemo_style_rlhf.scoring.combined import CombinedScorer
from nemo_style_rlhf.scoring.interface import RewardError, ScoringSample

WAIT_S = 30.0

REWARDS = '''
from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import signal
import sys
import time

import numpy


class Mine(Exception):
    """Cannot be unpickled: it wants two arguments."""

    def __init__(self, left, right):
        super().__init__(f"{left} and {right}")


@dataclasses.dataclass
class Odd:
    what: str


def ignore_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


ANSWERS = {
    "list": lambda n: [float(i) for i in range(n)],
    "numpy": lambda n: numpy.arange(n, dtype=numpy.float16),
    "numbers": lambda n: [numpy.float64(i) for i in range(n)],
    "column": lambda n: numpy.arange(n)[:, None],
    "booleans": lambda n: [i % 2 == 1 for i in range(n)],
    "dict": lambda n: {"rewards": [1.0] * n, "scores": numpy.arange(n), "extra_logs": {"length": numpy.arange(n)}},
    "raise": lambda n: [][0],
    "mine": lambda n: (_ for _ in ()).throw(Mine("one", "two\\nmore")),
    "timeout": lambda n: (_ for _ in ()).throw(TimeoutError("the judge was slow")),
    "exit": lambda n: sys.exit(0),
    "die": lambda n: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda n: time.sleep(600),
    "stubborn": lambda n: ignore_sigterm(),
    "nan": lambda n: [math_nan] * n,
    "short": lambda n: [0.0] * (n - 1),
    "scalar": lambda n: 1.0,
    "string": lambda n: "0.5",
    "words": lambda n: ["good"] * n,
    "none": lambda n: None,
    "holes": lambda n: [None] * n,
    "odd": lambda n: Odd("thing"),
    "generator": lambda n: (1.0 for _ in range(n)),
    "no_rewards": lambda n: {"scores": [1.0] * n},
    "extra_list": lambda n: {"rewards": [1.0] * n, "extra_logs": []},
    "extra_one": lambda n: {"rewards": [1.0] * n, "extra_logs": {"mean": numpy.float32(0.5), "any": True}},
    "extra_short": lambda n: {"rewards": [1.0] * n, "extra_logs": {"length": [1.0] * (n + 1)}},
    "huge": lambda n: [10**400] * n,
    "pid": lambda n: [float(os.getpid())] * n,
}
math_nan = float("nan")


def reward_func(queries, prompts, labels):
    """What the first label asks for."""
    assert [query[: len(prompt)] for query, prompt in zip(queries, prompts)] == prompts
    return ANSWERS[labels[0]](len(queries))


async def later(queries, prompts, labels):
    await asyncio.sleep(0.01)
    return reward_func(queries, prompts, labels)
'''
TENSORS = """
import torch

ANSWERS = {
    "torch": lambda n: torch.arange(n, dtype=torch.bfloat16).requires_grad_(),
    "tensors": lambda n: [torch.tensor(float(i)) for i in range(n)],
}


def reward_func(queries, prompts, labels):
    return ANSWERS[labels[0]](len(queries))
"""


def samples(*labels):
    return [
        ScoringSample.of_texts(torch.tensor([1, 2]), f"prompt {i} ", f"response {i}", label)
        for i, label in enumerate(labels)
    ]


def result(future):
    return future.result(WAIT_S)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, timeout_s=15.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


def masked(source, group):
    """The same group with on_error=mask."""
    return result(CombinedScorer({"it": (source, 1.0)}, on_error="mask").score(group))


def stopped(source, group):
    """What a run that stops would say."""
    with pytest.raises(RewardError) as caught:
        result(CombinedScorer({"it": (source, 1.0)}, on_error="stop").score(group))
    said = str(caught.value)
    assert said.count("set reward.on_error=mask to train without such samples") == 1
    assert "\n" not in said and len(said) < 400
    return said


def all_failed(scores, count):
    return len(scores.rewards) == count and scores.rewards.isnan().all() and scores.failures.all()


class Endpoint:
    """A reward endpoint in a thread of this process; ``behave`` is what it does with a request."""

    def __init__(self, behave="rewards", port=0):
        self.behave = behave
        self.bodies = []
        self.gate = threading.Event()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.bodies.append(body)
                status, answer = endpoint.answer(body)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(answer.encode())

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/get_reward"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, body):
        count = len(body["query"])
        rewards = [float(len(query)) for query in body["query"]]
        match self.behave:
            case "slow" | "gated":
                self.gate.wait(10.0)
            case "error":
                return 500, "it broke"
            case "garbage":
                return 200, "<html>not\nJSON</html>"
            case "short":
                return 200, json.dumps([1.0] * (count - 1))
            case "nan":
                return 200, json.dumps({"rewards": [math.nan] * count})
        return 200, json.dumps({"rewards": rewards, "scores": [1.0] * count, "extra_logs": {"words": [2] * count}})

    def close(self):
        self.gate.set()
        self.server.shutdown()
        self.server.server_close()
