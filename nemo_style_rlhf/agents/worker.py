"""An episode worker: a process that runs many environments in one event loop. It imports no torch, to start fast.

    python -m nemo_style_rlhf.agents.worker SETUP

EpisodeWorkers starts it with a :class:`Setup` as JSON. Environments print to the output of the process; the trainer talks to it
over a socket.
"""

import asyncio
import contextlib
import contextvars
import dataclasses
import faulthandler
import functools
import inspect
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nemo_style_rlhf.agents.attempt import Attempt
from nemo_style_rlhf.agents.environment import Environment
from nemo_style_rlhf.agents.wire import LINE_LIMIT, SharedState, read_action, read_task
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch.user_code import UserFile

ENVIRONMENT = UserFile("agent_environment", "agent", "environment", "class")
METHODS = ("reset", "step", "execute")
TICK_S = 1.0
"""Maximum seconds between two updates of :attr:`SharedState.alive`."""
DUMP = signal.SIGUSR2
"""Makes a worker print a stack trace of each of its threads."""
QUIT_S = 2.0
"""Seconds that environments have to release their resources when the run ends."""
CURRENT: contextvars.ContextVar[int] = contextvars.ContextVar("CURRENT", default=0)
"""Number of the attempt to which a task of the event loop belongs."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """Settings that a worker receives at its start."""

    path: str
    name: str
    episodes_per_worker: int
    step_timeout_s: float
    episode_timeout_s: float
    search: list[str]
    """Folders in which the trainer looks for modules."""
    socket: int
    """Descriptor of the worker's end of the socket."""
    memory: int
    """Descriptor of the :class:`SharedState`."""


class Worker:
    """Runs attempts and reports on them to the trainer."""

    def __init__(self, setup: Setup, make: Callable[[], Any], words: SharedState) -> None:
        self.setup, self.make = setup, make
        self.stalled = 0.0
        """Seconds of all slices that kept the event loop busy for more than a tenth of agent.step_timeout_s."""
        self._words, self._path = words, str(Path(setup.path).resolve())
        self._attempts: dict[int, Attempt] = {}
        self._shown: set[str] = set()

    async def serve(self, connection: socket.socket) -> None:
        """Execute the trainer's orders until it sends no more."""
        self._loop = asyncio.get_running_loop()
        self._threads = Threads(4 * self.setup.episodes_per_worker)
        self._loop.set_default_executor(self._threads)
        self._loop.set_task_factory(self._new_task)  # type: ignore[arg-type]
        reader, self._writer = await asyncio.open_unix_connection(sock=connection, limit=LINE_LIMIT)
        self._tick()
        self.send({"ready": os.getpid()})
        while told := await reader.readline():
            message = json.loads(told)
            if message["do"] == "quit":
                break
            self._obey(message)
        for attempt in self._attempts.values():
            attempt.abandon()
        if tasks := [attempt.task for attempt in self._attempts.values()]:
            await asyncio.wait(tasks, timeout=QUIT_S)

    def send(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    def show(self, error: BaseException, said: str) -> None:
        """Print the traceback of an environment's exception, once for each sentence about it."""
        if said not in self._shown and len(self._shown) < 1000:
            self._shown.add(said)
            frames = error.__traceback__
            while frames is not None and frames.tb_frame.f_code.co_filename != self._path:
                frames = frames.tb_next  # our own frames
            traceback.print_exception(type(error), error, frames or error.__traceback__)

    def slice_of(self, number: int, part: Callable[..., Any], *given: Any) -> Any:
        """Execute a part of an attempt's code that does not wait. The shared state shows the trainer that it runs."""
        began = time.monotonic()
        self._words.enter(number, began)
        try:
            return part(*given)
        except (
            SystemExit,
            KeyboardInterrupt,
        ) as error:  # in a task that the environment made: it would stop the event loop
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        finally:
            self._words.leave()
            seconds = time.monotonic() - began
            if seconds > self.setup.step_timeout_s / 10:
                self.stalled += seconds
                if number in self._attempts:
                    self._attempts[number].stalled += seconds

    def _obey(self, message: dict[str, Any]) -> None:
        do, number = message["do"], message.get("number", 0)
        if do == "start":
            attempt = self._attempts[number] = Attempt(self, number, read_task(message["task"]))
            attempt.task = asyncio.Task(_Marked(self, number, self._run(attempt)), loop=self._loop)
            attempt.task.add_done_callback(functools.partial(self._closed, number))
        elif do == "forget":
            for attempt in self._attempts.values():
                attempt.abandon()
        elif attempt := self._attempts.get(number):  # type: ignore[assignment]
            if do == "answer":
                attempt.answer(read_action(message["action"]))
            elif do == "finish":
                attempt.finish()

    async def _run(self, attempt: Attempt) -> None:
        CURRENT.set(attempt.number)
        await attempt.run()

    def _closed(self, number: int, _: "asyncio.Task[None]") -> None:
        del self._attempts[number]
        self.send({"closed": number, "threads": self._threads.left_by(number)})

    def _new_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **given: Any) -> "asyncio.Task[Any]":
        """Make a task. Tasks of an environment count as its attempt's code."""
        return asyncio.Task(_Marked(self, CURRENT.get(), coroutine), loop=loop, **given)

    def _tick(self) -> None:
        self._words.alive = time.monotonic()
        for attempt in self._attempts.values():
            attempt.look()
        self._loop.call_later(min(TICK_S, self.setup.step_timeout_s / 4), self._tick)


class Threads(ThreadPoolExecutor):
    """Threads of ``asyncio.to_thread``. Counts those that an attempt has left behind, since nothing can interrupt them."""

    def __init__(self, most: int) -> None:
        super().__init__(most, thread_name_prefix="environment")
        self._jobs: dict[int, list[Future[Any]]] = {}

    def submit(self, part: Callable[..., Any], /, *given: Any, **named: Any) -> "Future[Any]":
        job = super().submit(part, *given, **named)
        if number := CURRENT.get():
            self._jobs.setdefault(number, []).append(job)
        return job

    def left_by(self, number: int) -> int:
        """Number of threads that still work for an attempt that has ended."""
        return sum(job.running() for job in self._jobs.pop(number, []))


class _Marked(Coroutine[Any, Any, Any]):
    """A coroutine of an attempt. Each of its steps is a slice."""

    def __init__(self, worker: Worker, number: int, coroutine: Any) -> None:
        self._worker, self._number, self._coroutine = worker, number, coroutine
        self.cr_await = coroutine

    def send(self, value: Any) -> Any:
        return self._worker.slice_of(self._number, self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._worker.slice_of(self._number, self._coroutine.throw, *error)

    def close(self) -> None:
        self._worker.slice_of(self._number, self._coroutine.close)

    def __await__(self) -> Any:
        return self._coroutine.__await__()


def load(path: str, name: str) -> type:
    """Load the class ``name`` from the file ``path``.

    Raises:
        UserError: the file has no such class, or cannot be imported.
    """
    found = ENVIRONMENT.load(path, name)
    if not inspect.isclass(found):
        raise UserError(f"{name} of {path} is no class: set agent.name to the class of the environment")
    own = {each for each in METHODS if getattr(found, each, None) not in (None, getattr(Environment, each))}
    if not own & {"step", "execute"} or (own == {"step"} and not issubclass(found, Environment)):
        raise UserError(
            f"{name} of {path} is no environment: give it the methods reset and step, as Environment has them"
        )
    return found


def main() -> None:
    setup = Setup(**json.loads(sys.argv[1]))
    words = SharedState(setup.memory)
    connection = socket.socket(fileno=setup.socket)
    connection.set_inheritable(False)
    os.set_inheritable(setup.memory, False)
    sys.argv[1:] = []
    sys.path[:] = setup.search
    try:
        make = load(str(Path(setup.path).resolve()), setup.name)
    except UserError as error:
        connection.sendall(json.dumps({"unready": str(error)}).encode() + b"\n")
        os._exit(1)
    faulthandler.register(DUMP, all_threads=True)
    loop = asyncio.new_event_loop()  # asyncio.run would wait for threads
    asyncio.set_event_loop(loop)
    loop.run_until_complete(Worker(setup, make, words).serve(connection))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)  # threads of environments may still run


if __name__ == "__main__":
    main()
