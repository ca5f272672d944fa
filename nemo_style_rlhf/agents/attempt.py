"""One attempt at an episode, in a worker's event loop. Imports no torch."""

import asyncio
import inspect
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_style_rlhf.agents.answers import WrongAnswer, checked
from nemo_style_rlhf.agents.environment import Action, Environment, Observation, Task
from nemo_style_rlhf.agents.wire import observation_fields
from nemo_style_rlhf.launch.user_code import sentence

if TYPE_CHECKING:
    from nemo_style_rlhf.agents.worker import Worker

LONG_S = 30.0
"""Seconds of an environment's turn after which the trainer learns in which line it waits."""
GRACE_S = 1.0
"""Seconds that a cancelled attempt may take to end before its process is killed."""


class LimitReached(BaseException):
    """Unwinds an environment whose episode has reached a limit."""


class Attempt:
    """Drives one environment and measures its time."""

    task: "asyncio.Task[None]"
    """The task that runs :meth:`run`."""

    def __init__(self, worker: "Worker", number: int, begin: Task) -> None:
        self.number = number
        self.stalled = 0.0
        """This attempt's part of the worker's ``stalled``."""
        self._worker, self._setup, self._begin = worker, worker.setup, begin
        self._path = str(Path(self._setup.path).resolve())
        self._loop = asyncio.get_running_loop()
        self._turn = 0
        self._action: asyncio.Future[Action] | None = None
        self._asked: Observation | None = None
        self._finished: Observation | None = None
        self._abandoned = False
        self._over: str | None = None
        """Predicate that names the time limit it exceeded."""
        self._spent = 0.0
        """Seconds that the environment took, up to its last answer."""
        self._began: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stage = 0
        self._told = False
        """True once the trainer was told where the environment waits."""

    async def run(self) -> None:
        """Run the attempt to its end and report the result to the trainer."""
        made: list[Any] = []
        self._go()
        try:
            observation, error = await self._execute(made), None
        except BaseException as raised:  # noqa: BLE001 sys.exit() ends only this attempt
            observation, error = None, raised
        self._pause()
        self._stage += 1
        if not self._abandoned:
            self._worker.send({"number": self.number, **self._end(self._finished or observation, error)})
        if made:
            await self._close(made[0])

    def answer(self, action: Action) -> None:
        """Give the environment the policy's answer if it waits for one."""
        if self._action is not None and not self._action.done():
            self._go()
            self._turn += 1
            self._action.set_result(action)

    def finish(self) -> None:
        """End the episode with the observation that asked for an answer."""
        if self._action is not None and not self._action.done():
            self._go()
            self._finished = self._asked
            self._action.set_exception(LimitReached())

    def abandon(self) -> None:
        """End the attempt without a report to the trainer."""
        if not self._abandoned:
            self._abandoned = True
            if self._stage == 0:
                self._cancel()

    async def act(self, observation: Observation) -> Action:
        """Return the policy's answer to ``observation``."""
        if self._finished is not None:
            raise LimitReached
        if self._action is not None:
            raise RuntimeError("policy.act was called again before it had returned")
        asked = self._checked("execute", observation)
        if asked.done:
            raise RuntimeError("policy.act was given an observation that is done")
        self._asked, self._action = asked, self._loop.create_future()
        self._pause()
        told = {"number": self.number, "asked": observation_fields(asked)}
        self._loop.call_soon(self._worker.send, told)  # once this slice has ended: what happens later is not its fault
        action = await self._action
        self._action = None
        return action

    async def _execute(self, made: list[Any]) -> Observation:
        made.append(environment := self._worker.make())
        own = getattr(environment, "execute", None)
        if own is None or getattr(own, "__func__", None) is Environment.execute:
            own = _Checked(self, environment).execute
        return self._checked("execute", await own(self._begin, self))

    async def called(self, environment: Any, method: str, given: Any) -> Observation:
        """Return the checked answer of ``reset`` or ``step``. Both may be ordinary functions."""
        answer = getattr(environment, method)(given)
        return self._checked(method, await answer if inspect.isawaitable(answer) else answer)

    def _checked(self, method: str, answer: Any) -> Observation:
        try:
            return checked(answer)
        except WrongAnswer as error:
            if error.method is None:
                error.method = method
            raise

    async def _close(self, environment: Any) -> None:
        """Close the environment. A failure here does not invalidate the episode."""
        timer = self._loop.call_later(self._setup.step_timeout_s, self._cancel)
        try:
            answer = environment.close() if hasattr(environment, "close") else None
            if inspect.isawaitable(answer):
                await answer
        except BaseException as error:  # noqa: BLE001 as in run
            self._worker.show(error, f"close: {sentence(error, self._path)}")
        finally:
            timer.cancel()
            self._stage += 1

    def _end(self, observation: Observation | None, error: BaseException | None) -> dict[str, Any]:
        if observation is not None and (self._over is None or self._finished is not None):
            return {"ended": observation_fields(observation), "seconds": self._spent}
        setup = self._setup
        if self._over is not None:
            where = self._lines(error)
            return {"failed": f"{setup.name} of {setup.path} {self._over}{where}", "timed_out": True}
        assert error is not None
        if isinstance(error, WrongAnswer):
            method = getattr(self._worker.make, error.method or "", None)
            code = getattr(inspect.unwrap(method) if callable(method) else None, "__code__", None)
            where = f" (line {code.co_firstlineno})" if code is not None and code.co_filename == self._path else ""
            said = f"{setup.name}.{error.method} of {setup.path}{where} {error}: correct what it returns"
        else:
            said = f"{setup.name} of {setup.path} raised {sentence(error, self._path)}: correct it"
            self._worker.show(error, said)
        return {"failed": said, "timed_out": False}

    def _lines(self, error: BaseException | None) -> str:
        """Clause that names the line where the environment waited when it was cancelled."""
        frames = traceback.extract_tb(error.__traceback__) if error else []
        lines = [frame.lineno for frame in frames if frame.filename == self._path]
        return f", when it waited in line {lines[-1]}" if lines else ""

    def look(self) -> None:
        """Tell the trainer where the environment waits once it has waited for a long time."""
        if not self._told and self._running > min(LONG_S, self._setup.step_timeout_s / 2):
            self._told, line = True, None
            waits: Any = self.task.get_coro()
            while waits is not None:
                frame = getattr(waits, "cr_frame", None)
                line = frame.f_lineno if frame is not None and frame.f_code.co_filename == self._path else line
                waits = getattr(waits, "cr_await", None)
            self._worker.send({"number": self.number, "waits": line})

    def _go(self) -> None:
        """Begin the environment's turn."""
        self._began, self._others, self._due = time.monotonic(), self._worker.stalled - self.stalled, False
        self._told = False
        self._look_at_the_clock()

    def _pause(self) -> None:
        """Begin the policy's turn."""
        self._spent += self._running
        self._began = None
        if self._timer is not None:
            self._timer.cancel()

    @property
    def _running(self) -> float:
        """Seconds of the environment's turn, minus long stalls of the event loop by other attempts."""
        if self._began is None:
            return 0.0
        return time.monotonic() - self._began - (self._worker.stalled - self.stalled - self._others)

    def _look_at_the_clock(self) -> None:
        step, episode = self._setup.step_timeout_s, self._setup.episode_timeout_s
        left = min(step - self._running, episode - self._spent - self._running)
        if left > 0:
            self._timer = self._loop.call_later(left, self._look_at_the_clock)
        elif not self._due:  # an answer that came in time may still be queued in the event loop
            self._due = True
            self._timer = self._loop.call_later(min(0.1, step / 10), self._look_at_the_clock)
        elif self._running >= step:
            self._over = f"gave no answer within {step:g} s (agent.step_timeout_s)"
            self._cancel()
        else:
            self._over = f"took more than {episode:g} s in one episode (agent.episode_timeout_s)"
            self._cancel()

    def _cancel(self) -> None:
        self.task.cancel()
        self._loop.call_later(GRACE_S, self._insist, self._stage)

    def _insist(self, stage: int) -> None:
        if self._stage == stage:
            self._worker.send({"stuck": self.number, "over": self._over})


class _Checked(Environment):
    """Checks every answer of an environment that is driven in the usual order of calls."""

    def __init__(self, attempt: Attempt, environment: Any) -> None:
        self._attempt, self._environment = attempt, environment

    async def reset(self, task: Task) -> Observation:
        return await self._attempt.called(self._environment, "reset", task)

    async def step(self, action: Action) -> Observation:
        return await self._attempt.called(self._environment, "step", action)
