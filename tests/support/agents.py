"""The trainer's side of the gateway, for tests: samples are a function of prompt and seed."""

import json
import queue
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_style_rlhf.agents.api_requests import Offer
from nemo_style_rlhf.agents.environment import Action, Task
from nemo_style_rlhf.agents.events import Called, Ended, Event, Failed
from nemo_style_rlhf.agents.gateway import Gateway
from nemo_style_rlhf.agents.sessions import Row, Session
from nemo_style_rlhf.data.encoding import Encoder
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.gateway import GatewayConfig

WORDS = ("yes", "no", "a cat", "a mat", "perhaps", "the question", "an answer")
LONGEST_S = 120.0
OFFER = Offer(model="policy", temperature=1.0, top_p=1.0, max_length=32)
PYTHON_CLIENT = """
import json, os, sys

TASK = json.loads(sys.stdin.read())

def post(path, **body):
    import urllib.request
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
        return json.load(answer)

def ask(*messages, **more):
    return post("/chat/completions", messages=list(messages), **more)["choices"][0]["message"]["content"]

def user(content):
    return {"role": "user", "content": content}

def assistant(content):
    return {"role": "assistant", "content": content}
"""
"""The beginning of a program that needs no library."""


def program(path: Path, text: str, *, python: str) -> list[str]:
    """The command of a program of PYTHON_CLIENT and ``text``."""
    path.write_text(PYTHON_CLIENT + text)
    return [python, "-S", str(path)]  # without the packages of the environment, it starts several times as fast


class Trainer:
    """Answers the calls of a gateway's programs, side by side or in a random order."""

    def __init__(
        self,
        encoder: Encoder,
        config: GatewayConfig,
        *,
        attempts: int = 3,
        episode_timeout_s: float = 60.0,
        order: random.Random | None = None,
        most_calls: int = 100,
        policy: Callable[[Called, Sequence[int], int], Action] | None = None,
    ) -> None:
        """
        Args:
            order: in which calls that wait together are answered; by default as they come.
            most_calls: of an episode, after which it is told that it has reached a limit.
        """
        self._encoder, self._order, self._most_calls = encoder, order, most_calls
        self._policy = policy or self.sample
        (self._end,) = encoder.rendered("<|im_end|>")
        self.events: queue.Queue[Event] = queue.Queue()
        self.seen: list[Event] = []
        self.sessions: dict[tuple[int, int], Session] = {}
        self.ended: dict[int, Ended] = {}
        self.failed: dict[int, list[Failed]] = defaultdict(list)
        self._tasks: dict[int, Task] = {}
        self._calls: dict[int, int] = defaultdict(int)
        self.gateway = Gateway(
            config, self.events.put, offer=OFFER, attempts=attempts, episode_timeout_s=episode_timeout_s
        )

    def sample(self, call: Called, token_ids: Sequence[int], seed: int) -> Action:
        draw = random.Random(json.dumps([seed, [*token_ids]]))
        text = " ".join(draw.choices(WORDS, k=3))
        ids = (*self._encoder.rendered(text), self._end)
        return Action(text, {"role": "assistant", "content": text}, ids, tuple(-token / 64 for token in ids))

    def start(self, *tasks: Task) -> None:
        """Start episodes, numbered from 0 or on from those before."""
        for task in tasks:
            episode = len(self._tasks)
            self._tasks[episode] = task
            self.gateway.start(episode, task)

    def run(self, *tasks: Task) -> "Trainer":
        """Start episodes, and answer calls until all have ended."""
        self.start(*tasks)
        while self.left:
            self.serve_once()
        return self

    @property
    def left(self) -> set[int]:
        lost = {episode for episode, failures in self.failed.items() if failures[-1].last}
        return self._tasks.keys() - self.ended.keys() - lost

    def serve_once(self) -> None:
        """Take the events that are there, at least one, and answer the calls among them."""
        calls = []
        event: Event | None = self.events.get(timeout=LONGEST_S)
        while event is not None:
            self.seen.append(event)
            if isinstance(event, Called):
                calls.append(event)
            elif isinstance(event, Ended):
                self.ended[event.episode] = event
            elif isinstance(event, Failed):
                self.failed[event.episode].append(event)
            event = self._soon()
        if self._order is not None:
            self._order.shuffle(calls)
        for call in calls:
            self._answer(call)

    def _soon(self) -> Event | None:
        try:
            return self.events.get(timeout=0.05 if self._order else 0)
        except queue.Empty:
            return None

    def _answer(self, call: Called) -> None:
        key = call.episode, call.attempt
        if key not in self.sessions:
            self.sessions[key] = Session(self._tasks[call.episode].seed)
        session = self.sessions[key]
        self._calls[call.episode] += 1
        if self._calls[call.episode] > self._most_calls:
            self.gateway.finish(call)
            return
        try:
            ids = session.prompt_for(call, self._encoder)
        except UserError as error:
            self.gateway.finish(call, str(error))
            return
        action = self._policy(call, ids, session.seed_for(call, ids))
        session.record(call, ids, action, version=3)
        self.gateway.answer(call, replace(action, prompt_tokens=len(ids)))

    def rows(self, episode: int) -> list[Row]:
        """The rows of an episode that has ended."""
        session = self.sessions.get((episode, self.ended[episode].attempt))
        return session.rows() if session else []

    def close(self) -> None:
        self.gateway.close()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def until(condition: Callable[[], bool], timeout_s: float = LONGEST_S) -> bool:
    """Whether the condition comes to hold."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()
