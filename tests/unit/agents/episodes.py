"""An environment that does everything wrong, a policy that answers it, and what tests ask about processes."""

import os
import queue
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from nemo_style_rlhf.agents.environment import Action, Observation, Task
from nemo_style_rlhf.agents.events import Asked, Ended, Event, Failed
from nemo_style_rlhf.agents.workers import EpisodeWorkers
from nemo_style_rlhf.schema.agent import AgentConfig

WAIT_S = 60.0
"""Longest silence of the workers; far longer than any test lasts."""
ENVIRONMENT = '''
import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

from nemo_style_rlhf.agents.environment import Environment as Base
from nemo_style_rlhf.agents.environment import Observation

LIFE = 600.0


class Own(Base):
    """Has an order of calls of its own."""

    async def execute(self, task, policy):
        texts = []
        for number in range(3):
            asked = Observation(f"{task.prompt} {number}", metrics={"answers": len(texts)})
            try:
                texts.append((await policy.act(asked)).text)
            finally:
                self.unwound = True
        if task.prompt == "done":
            await policy.act(Observation("x", done=True))
        if task.prompt == "wrong":
            return texts
        return Observation(" ".join(texts), 1.0, True)


class Duck:
    """Has just what it needs, and answers without delay."""

    def reset(self, task):
        return Observation(task.prompt)

    def step(self, action):
        return Observation(action.text, done=True)


def child():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True).pid


async def in_a_task():
    await asyncio.sleep(0)
    os._exit(5)


async def stubborn():
    while True:
        try:
            await asyncio.sleep(LIFE)
        except asyncio.CancelledError:
            pass


async def wait_for_a_thread():
    threading.Timer(0.1, os._exit, [7]).start()
    await asyncio.sleep(LIFE)


class Environment(Base):
    """Its prompt, up to a colon, says what happens instead of the answer to the first action."""

    async def reset(self, task):
        self.task, self.kind, self.turns = task, task.prompt.partition(":")[0], 0
        if self.kind == "reset":
            return None
        if self.kind == "later" and task.attempt > 2:
            self.kind = "fine"
        return Observation([{"role": "user", "content": task.prompt}], metrics={"pid": os.getpid()})

    async def step(self, action):
        self.turns += 1
        answer = getattr(self, self.kind.replace("later", "error"), None)
        if answer is not None:
            answer = answer()
            return await answer if asyncio.iscoroutine(answer) else answer
        return Observation(f"turn {self.turns}", 0.5 * self.turns, self.turns == 2, metrics={"seed": self.task.seed})

    def error(self):
        return [][0]

    def leave(self):
        sys.exit(4)

    async def leave_in_a_task(self):
        async def leave():
            sys.exit(4)

        await asyncio.create_task(leave())

    def hang(self):
        return asyncio.sleep(LIFE)

    def stubborn(self):
        return stubborn()

    def block(self):
        time.sleep(LIFE)

    def spin(self):
        while True:
            pass

    def exit(self):
        os._exit(3)

    async def exit_in_a_task(self):
        await asyncio.gather(in_a_task(), asyncio.sleep(LIFE))

    def exit_in_a_thread(self):
        return wait_for_a_thread()

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def kill_its_group(self):
        os.killpg(0, signal.SIGKILL)

    def segfault(self):
        import ctypes

        ctypes.string_at(0)

    def give(self):
        """Evaluate what follows the colon."""
        return eval(self.task.prompt.partition(":")[2])

    async def child(self):
        with open(self.task.label, "a") as notes:
            print(child(), os.getpid(), file=notes)
        await asyncio.sleep(LIFE)

    def child_and_block(self):
        with open(self.task.label, "a") as notes:
            print(child(), os.getpid(), file=notes)
        time.sleep(LIFE)

    async def thread(self):
        await asyncio.to_thread(time.sleep, LIFE)

    def slow(self):
        """Keep the event loop busy for less than is allowed."""
        time.sleep(0.4)
        return Observation("slow", done=True)

    async def wait(self):
        await asyncio.sleep(0.3)
        return Observation("waited", done=True)

    async def many_steps(self):
        await asyncio.sleep(0.2)
        return Observation("more")

    def say(self):
        print("said by the environment")
        return Observation("said", done=True)

    async def close(self):
        if self.kind == "close_badly":
            raise OSError("the door is stuck")
        if self.task.label and not self.kind.startswith("child"):
            with open(self.task.label, "a") as notes:
                print("closed", self.kind, file=notes)
'''


def environment(folder: Path, source: str = ENVIRONMENT) -> Path:
    path = folder / "my_env.py"
    path.write_text(source)
    return path


def config(folder: Path, **given: Any) -> AgentConfig:
    """One worker that runs the environment, with little patience."""
    path = str(environment(folder))
    return AgentConfig(**{"path": path, "workers": 1, "step_timeout_s": 0.5, "attempts": 2, **given})


def line_of(text: str) -> int:
    """Number of the first line of the environment's file that holds ``text``."""
    return next(number for number, line in enumerate(ENVIRONMENT.splitlines(), 1) if text in line)


class Run:
    """Workers, and a policy that answers whatever they ask. Used as a context."""

    def __init__(self, config: AgentConfig, *, finish_at: int | None = None) -> None:
        """``finish_at``: at this turn, from 0, every episode is told that a limit is reached."""
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._finish_at = finish_at
        self._open: set[int] = set()
        self._turns: dict[tuple[int, int], int] = {}
        self.workers = EpisodeWorkers(config, self._events.put)
        self.asked: list[Asked] = []
        self.ended: dict[int, Ended] = {}
        self.failed: dict[int, list[Failed]] = {}
        self.pids: set[int] = set()
        """Of the worker processes that have asked."""

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.workers.close()

    def start(self, prompts: Sequence[str], label: str | None = None) -> None:
        for number, prompt in enumerate(prompts):
            self._open.add(number)
            self.workers.start(number, Task(prompt, label=label, seed=number))

    def event(self) -> Event:
        """The next event, unanswered."""
        return self._events.get(timeout=WAIT_S)

    def drop(self) -> None:
        """Take no notice of what has come, or was to come."""
        self._open.clear()
        while not self._events.empty():
            self._events.get()

    def silent(self) -> bool:
        return self._events.empty()

    def to_the_end(self) -> None:
        """Answer until every episode has ended or failed for good."""
        self.to_the_end_of(*self._open)

    def to_the_end_of(self, *episodes: int) -> None:
        while self._open.intersection(episodes):
            event = self.event()
            if isinstance(event, Asked):
                self._answer(event)
            elif isinstance(event, Ended):
                self._open.remove(event.episode)
                self.ended[event.episode] = event
            elif isinstance(event, Failed):
                self.failed.setdefault(event.episode, []).append(event)
                if event.last:
                    self._open.remove(event.episode)

    def play(self, prompts: Sequence[str], label: str | None = None) -> "Run":
        self.start(prompts, label)
        self.to_the_end()
        return self

    def _answer(self, asked: Asked) -> None:
        self.asked.append(asked)
        if "pid" in asked.observation.metrics:
            self.pids.add(int(asked.observation.metrics["pid"]))
        turn = self._turns.get((asked.episode, asked.attempt), 0)
        self._turns[asked.episode, asked.attempt] = turn + 1
        if turn == self._finish_at:
            self.workers.finish(asked)
        else:
            message = {"role": "assistant", "content": f"answer {turn}"}
            self.workers.answer(asked, Action(message["content"], message, (1, 2), (-0.5, -0.25), turn=turn))


def usual_end(seed: int) -> Observation:
    """The last observation of an episode in which nothing goes wrong."""
    return Observation("turn 2", 1.0, True, metrics={"seed": seed})


def alive(pid: int) -> bool:
    """Whether there is such a process, except one that has ended and whose parent has not noticed yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def descendants() -> set[int]:
    """Process ids of all that this process and its children have started."""
    return {each.pid for each in psutil.Process().children(recursive=True)}


def group_is_empty(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return True
    return False


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not (reached := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return reached
