"""Runs episodes in worker processes, and retries an episode whose environment failed."""

import contextlib
import itertools
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from nemo_style_rlhf.agents.attempt import GRACE_S
from nemo_style_rlhf.agents.environment import Action, Task
from nemo_style_rlhf.agents.events import Asked, Called, Emit, Ended, Event, Failed
from nemo_style_rlhf.agents.process import WorkerProcess
from nemo_style_rlhf.agents.wire import action_fields, line, read_observation, task_fields
from nemo_style_rlhf.agents.worker import QUIT_S, TICK_S
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.agent import AgentConfig

START_S = 300.0
"""Maximum seconds for the import of an environment's file."""
SILENCE_S = 10.0
"""Seconds, in addition to a step's, that an event loop may stand still while it executes no attempt's code."""
STARTS = 3
"""Consecutive failed starts after which a worker process is given up."""
LOSSES = 3
"""Times that an episode may lose its worker for no known reason. Each further loss counts as a failed attempt."""


@dataclass
class _Episode:
    """An episode that has neither ended nor failed for good."""

    episode: int
    task: Task
    generation: int
    """Number of times that all episodes had been forgotten before it started."""
    attempt: int = 1
    failures: int = 0
    """Failed attempts that count against agent.attempts."""
    losses: int = 0
    """Attempts lost for no known reason. The first LOSSES of them do not count."""
    number: int = 0
    """Number of the running attempt between trainer and worker, never used for another attempt."""
    asked: Asked | None = None
    """The event that waits for an answer."""
    line: int | None = None
    """Line of its file in which the environment waits, if it has waited for a long time."""
    failure: dict[str, Any] | None = None
    """The worker's report of the failed attempt, while the environment is still closing."""


@dataclass(frozen=True)
class _Blame:
    """The reason that a worker process ended."""

    number: int
    """The responsible attempt, or 0."""
    reason: str
    timed_out: bool = True


@dataclass
class _Worker:
    """A worker process, replaced by a new one after its end."""

    process: WorkerProcess
    ready: bool = False
    failed_starts: int = 0
    running: dict[int, _Episode | None] = field(default_factory=dict)
    """Attempts that occupy it, by number; None for one that has ended or was abandoned, and is being closed."""
    blame: _Blame | None = None
    threads: int = 0
    """Threads of its process that ended attempts still occupy."""
    gone: bool = False
    """True if it is not replaced: its starts keep failing, or the run ends."""


class EpisodeWorkers:
    """The :class:`~nemo_style_rlhf.agents.events.EpisodeSource` of environments, classes in a user's Python file.

    One thread owns processes and episodes. Methods leave it a note; only :meth:`forget` and :meth:`close` may wait. The thread
    calls ``emit``. ``emit`` must not wait for a thread that is in :meth:`forget`.
    """

    def __init__(self, config: AgentConfig, emit: Emit) -> None:
        """Start the workers and wait for the first. Raise :class:`UserError` if the file or its class is missing or cannot be
        imported."""
        assert config.path is not None  # the caller checks that there is an environment
        self._config, self._emit = config, emit
        self._called = f"{config.class_name} of {config.path}"
        self._limit_s = min(config.step_timeout_s, config.episode_timeout_s)
        self._generation = 0
        self._emitting = threading.RLock()
        self._notes: deque[Callable[[], None]] = deque()
        self._bell, self._rung = socket.socketpair()
        for end in (self._bell, self._rung):
            end.setblocking(False)
        self._closing: float | None = None
        self._first: Future[None] = Future()
        self._fault: BaseException | None = None
        self._workers: list[_Worker] = []
        self._open: dict[int, _Episode] = {}
        self._waiting: deque[_Episode] = deque()
        self._numbers = itertools.count(1)
        self._hopeless = ""
        """The reason that no worker process can be started any more."""
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._serve, name="episode workers", daemon=True)
        self._thread.start()
        try:
            self._first.result()
        except BaseException:
            self.close()
            raise

    def start(self, episode: int, task: Task) -> None:
        fresh = _Episode(episode, task, self._generation)

        def begin() -> None:
            self._open[episode] = fresh
            self._waiting.append(fresh)

        self._note(begin)

    def answer(self, asked: Asked | Called, action: Action) -> None:
        self._reply(asked, {"do": "answer", "action": action_fields(action)})

    def finish(self, asked: Asked | Called, reason: str = "") -> None:
        self._reply(asked, {"do": "finish"})

    def waits_for(self, episode: int) -> str:
        line = None if (state := self._open.get(episode)) is None else state.line
        return self._config.class_name if line is None else f"{self._config.class_name}, line {line}"

    def forget(self) -> None:
        with self._emitting:  # an event that is on its way arrives before this returns
            self._generation += 1
        self._note(self._forget)

    def close(self) -> None:
        with self._emitting:
            self._generation += 1
        if self._thread.is_alive():
            self._note(self._quit)
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def _note(self, note: Callable[[], None]) -> None:
        if self._fault is not None:
            raise RuntimeError("the thread of the episode workers has ended") from self._fault
        self._notes.append(note)
        with contextlib.suppress(BlockingIOError):  # a wakeup is already pending
            self._bell.send(b"!")

    def _reply(self, asked: Asked | Called, message: dict[str, Any]) -> None:
        def reply() -> None:
            state = self._open.get(asked.episode)
            if state is None or state.asked is None or state.asked != asked:
                return
            state.asked = state.line = None
            for worker in self._workers:
                if worker.running.get(state.number) is state:
                    worker.process.send(line({**message, "number": state.number}))

        self._note(reply)

    # All that follows runs in the thread.

    def _forget(self) -> None:
        self._open.clear()
        self._waiting.clear()
        for worker in self._workers:
            worker.running = dict.fromkeys(worker.running)
            if worker.running:
                worker.process.send(line({"do": "forget"}))

    def _quit(self) -> None:
        self._closing = time.monotonic()
        for worker in self._workers:
            if worker.ready:
                worker.process.send(line({"do": "quit"}))
            else:
                worker.process.stop()

    def _serve(self) -> None:
        try:
            self._selector.register(self._rung, selectors.EVENT_READ)
            for _ in range(self._config.workers):
                self._workers.append(worker := _Worker(WorkerProcess(self._config)))
                self._selector.register(worker.process, selectors.EVENT_READ, worker)
            while self._closing is None or any(not worker.gone for worker in self._workers):
                self._turn()
        except BaseException as error:
            self._fault = error
            if not self._first.done():
                self._first.set_exception(error)
            reason = f"the thread of the episode workers ended with {type(error).__name__}: {error}"
            for state in self._open.values():  # or the trainer would wait forever
                self._say(state, Failed(state.episode, state.attempt, reason, timed_out=False, last=True))
            raise
        finally:
            for worker in self._workers:
                worker.process.stop()
            for worker in self._workers:
                worker.process.close()
            self._selector.close()

    def _turn(self) -> None:
        """Start waiting episodes, wait for events, and handle them."""
        self._deal()
        for worker in self._workers:
            if not worker.gone:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.process.has_output else 0)
                self._selector.modify(worker.process, wanted, worker)
        busy = self._closing is not None or any(
            not worker.ready or worker.running or worker.process.stopping is not None for worker in self._workers
        )
        ready = self._selector.select(min(TICK_S, self._limit_s / 4) if busy else None)
        for key, events in ready:
            if key.data is None:
                self._rung.recv(4096)
                while self._notes:
                    self._notes.popleft()()
            else:
                owner: _Worker = key.data
                if events & selectors.EVENT_WRITE:
                    owner.process.flush()
                if events & selectors.EVENT_READ:
                    for message in owner.process.receive():
                        self._hear(owner, message)
        for worker in self._workers:
            if not worker.gone:
                self._watch(worker)
                if worker.process.ended:
                    self._bury(worker)

    def _deal(self) -> None:
        """Give waiting episodes to the workers with the fewest attempts."""
        if all(worker.gone for worker in self._workers):
            while self._waiting:
                self._fail(self._waiting.popleft(), self._hopeless, False, last=True)
        while self._waiting and self._closing is None:
            room = [
                worker
                for worker in self._workers
                if worker.ready
                and worker.blame is None
                and not self._is_worn(worker)
                and len(worker.running) < self._config.episodes_per_worker
            ]
            if not room:
                return
            worker = min(room, key=lambda worker: len(worker.running))
            state = self._waiting.popleft()
            state.number, state.asked, state.line, state.failure = next(self._numbers), None, None, None
            worker.running[state.number] = state
            task = task_fields(replace(state.task, attempt=state.failures + 1))
            worker.process.send(line({"do": "start", "number": state.number, "task": task}))

    def _is_worn(self, worker: _Worker) -> bool:
        """True if it must be replaced once its episodes have ended, because it has too few threads left."""
        return worker.threads > 2 * self._config.episodes_per_worker

    def _hear(self, worker: _Worker, message: dict[str, Any]) -> None:
        if "ready" in message:
            worker.ready, worker.failed_starts = True, 0
            worker.process.pid = message["ready"]
            if not self._first.done():
                self._first.set_result(None)
            return
        if "unready" in message:
            worker.blame = _Blame(0, message["unready"])
            return
        number = message.get("number", message.get("closed", message.get("stuck", 0)))
        state = worker.running.get(number)
        if "closed" in message:
            worker.running.pop(number, None)
            worker.threads += message["threads"]
            if state is not None:
                failure = state.failure or {"failed": f"{self._called} was given up", "timed_out": False}
                self._fail(state, failure["failed"], failure["timed_out"])
        elif "stuck" in message:
            over = message["over"] or "did not end"
            self._end(worker, _Blame(number, f"{self._called} {over}, and could not be interrupted"))
        elif state is None:
            return
        elif "asked" in message:
            state.asked = Asked(state.episode, state.attempt, read_observation(message["asked"]))
            self._say(state, state.asked)
        elif "ended" in message:
            worker.running[number] = None
            del self._open[state.episode]
            observation = read_observation(message["ended"])
            self._say(state, Ended(state.episode, state.attempt, observation, message["seconds"]))
        elif "failed" in message:
            state.failure = message
        elif "waits" in message:
            state.line = message["waits"]

    def _watch(self, worker: _Worker) -> None:
        """End a worker that hangs, exceeds a time limit, or is worn and idle."""
        process, now = worker.process, time.monotonic()
        process.look()
        words, limit = process.words, self._limit_s + min(GRACE_S, self._limit_s)
        if process.stopping is not None or process.ended:
            return
        if self._closing is not None and now - self._closing > QUIT_S + GRACE_S:
            process.stop()
        elif not worker.ready:
            if now - process.started > START_S:
                what = f"the file of the environment was not imported within {START_S:g} s: correct {self._config.path}"
                self._end(worker, _Blame(0, what))
        elif number := words.running:
            if now - words.since > limit and words.running == number:
                key = "step_timeout_s" if self._limit_s == self._config.step_timeout_s else "episode_timeout_s"
                what = f"kept its process busy for more than {self._limit_s:g} s (agent.{key})"
                process.show()
                self._end(worker, _Blame(number, f"{self._called} {what}: await what takes long"))
        elif now - words.alive > limit + SILENCE_S:
            self._end(worker, _Blame(0, f"a worker process of {self._called} did not react"))
        elif not worker.running and self._is_worn(worker):
            process.stop()

    def _end(self, worker: _Worker, blame: _Blame) -> None:
        if worker.blame is None:
            worker.blame = blame
        worker.process.stop()

    def _bury(self, worker: _Worker) -> None:
        """Find the cause of a process's end, retry its episodes, and replace it."""
        self._selector.unregister(worker.process)
        worker.process.close()
        blame = worker.blame or self._cause(worker)
        running = worker.running
        worker.running, worker.blame, worker.threads = {}, None, 0
        for number, state in reversed(running.items()):  # they are retried in the order of their start
            if state is None:
                continue
            if state.failure is not None:
                self._fail(state, state.failure["failed"], state.failure["timed_out"])
            elif number == blame.number:
                self._fail(state, blame.reason, blame.timed_out)
            elif blame.number in running:
                self._fail(state, "another episode ended the worker process of this one", False, charged=False)
            else:
                state.losses += 1
                self._fail(state, blame.reason, blame.timed_out, charged=state.losses > LOSSES)
        if not worker.ready:
            worker.failed_starts += 1
            if not self._first.done():
                self._first.set_exception(UserError(blame.reason))
        worker.ready = False
        if self._closing is None and worker.failed_starts < STARTS:
            worker.process = WorkerProcess(self._config)
            self._selector.register(worker.process, selectors.EVENT_READ, worker)
        else:
            worker.gone, self._hopeless = True, blame.reason

    def _cause(self, worker: _Worker) -> _Blame:
        """The cause of a process's unexpected end."""
        words, code = worker.process.words, worker.process.exit_code
        if code is None:
            how = "without a word"
        else:
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        if words.running:
            return _Blame(words.running, f"{self._called} ended its process {how}: correct it", False)
        if not worker.ready:
            what = f"the file of the environment ended its process {how} when it was imported"
            return _Blame(0, f"{what}: correct {self._config.path}", False)
        by = "from outside, by a thread of an environment, or for lack of memory"
        return _Blame(0, f"a worker process of {self._called} ended {how}, {by}", False)

    def _fail(self, state: _Episode, reason: str, timed_out: bool, *, charged: bool = True, last: bool = False) -> None:
        state.failures += charged
        last = last or state.failures >= self._config.attempts
        failed = Failed(state.episode, state.attempt, reason, timed_out, last, charged)
        if last:
            del self._open[state.episode]
        else:
            state.attempt += 1
            (self._waiting.append if charged else self._waiting.appendleft)(state)
        self._say(state, failed)

    def _say(self, state: _Episode, event: Event) -> None:
        with self._emitting:
            if state.generation == self._generation:
                self._emit(event)
