"""The gateway's episodes: attempts by key, running programs, and calls that wait for the policy."""

import asyncio
import contextlib
import hashlib
import os
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from nemo_style_rlhf.agents import programs
from nemo_style_rlhf.agents.api_requests import ApiError, Offer, Request
from nemo_style_rlhf.agents.environment import Action
from nemo_style_rlhf.agents.programs import BadReward, Exit

GONE = "the API key is not that of a running episode"


@dataclass(frozen=True)
class GatewaySettings:
    """Settings that the trainer sends its gateway at the start."""

    listener: int
    """Descriptor of the listening socket."""
    url: str
    """The endpoint's URL for programs on this host: OPENAI_BASE_URL."""
    token: str = field(repr=False)
    """The token for /sessions/next."""
    command: tuple[str, ...]
    folder: str
    programs: int
    calls_per_program: int
    max_request_bytes: int
    episode_timeout_s: float
    offer: Offer

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "GatewaySettings":
        return cls(**{**content, "command": tuple(content["command"]), "offer": Offer(**content["offer"])})


@dataclass(frozen=True)
class Place:
    """The place of an attempt in the queue."""

    episode: int
    attempt: int
    left: int
    """Attempts left, including this one."""
    task: dict[str, Any]


class Clock:
    """Counts the seconds that an attempt's program uses. It pauses while a call waits for the policy."""

    def __init__(self, seconds: float, expired: Callable[[], object]) -> None:
        """``expired`` is called when no seconds are left."""
        self._left, self._expired = seconds, expired
        self.used = 0.0
        """Seconds used up to the last pause."""
        self.go_on()

    def go_on(self) -> None:
        loop = asyncio.get_running_loop()
        self._since = loop.time()
        self._alarm = loop.call_later(self._left - self.used, self._expired)

    def pause(self) -> None:
        self._alarm.cancel()
        self.used += asyncio.get_running_loop().time() - self._since


@dataclass(eq=False)
class GatewaySession:
    """A running attempt, identified by its key."""

    place: Place
    key: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    clock: Clock | None = None
    """Counts agent.episode_timeout_s once the attempt has begun."""
    calls: dict[int, "asyncio.Future[tuple[Action, int]]"] = field(default_factory=dict)
    """Calls that wait for the policy, by number."""
    made: int = 0
    """Number of calls so far."""
    answered: dict[str, int] = field(default_factory=dict)
    """Numbers of the answered calls, by the name of the answer."""
    limited: bool = False
    """True once the episode has reached a limit of the run. Its program then gets no more answers; any exit code is accepted."""
    ended: bool = False
    ends: Callable[[], object] = lambda: None
    """Stops the program, if this host runs it."""

    @property
    def task(self) -> dict[str, Any]:
        return {**self.place.task, "attempt": self.place.attempt}


class SessionRegistry:
    """The gateway except for HTTP. Runs in one event loop."""

    def __init__(self, settings: GatewaySettings, send: Callable[[dict[str, Any]], None]) -> None:
        """``send`` sends an event to the trainer."""
        self.settings = settings
        self._send = send
        self._epoch, self._closed = 0, False
        self._waiting: deque[Place] = deque()
        self._services: deque[asyncio.Future[GatewaySession]] = deque()
        self._sessions: dict[bytes, GatewaySession] = {}
        self._running: dict[tuple[int, int], GatewaySession] = {}

    # --- the trainer's side -------------------------------------------------------------------------------------------

    def execute(self, order: Mapping[str, Any]) -> None:
        """Execute an order of the trainer. An order about an attempt that has ended is ignored."""
        kind = order["kind"]
        if kind == "start":
            self._waiting.append(Place(order["episode"], order["attempt"], order["left"], order["task"]))
            self._fill()
        elif kind == "forget":
            self._epoch = order["epoch"]
            self.forget()
        elif session := self._running.get((order["episode"], order["attempt"])):
            session.limited |= kind == "finish"
            waits = session.calls.get(order["call"])
            if waits is None or waits.done():
                return
            if kind == "answer":
                action = order["action"]
                tokens = {name: tuple(action[name]) for name in ("token_ids", "logprobs")}
                waits.set_result((Action(**{**action, **tokens}), order["prompt_tokens"]))
            elif kind == "refuse":
                waits.set_exception(ApiError(400, order["sentence"], param="messages"))
            else:
                waits.set_exception(_at_its_limit())

    def forget(self) -> None:
        """Abandon all episodes and end their programs."""
        self._waiting.clear()
        for session in [*self._running.values()]:
            self._close(session)

    def close(self) -> None:
        """Abandon all episodes. Present and future calls of :meth:`next` find no attempt."""
        self._closed = True
        self.forget()
        for found in self._services:
            if not found.done():
                found.set_exception(TimeoutError)

    def _tell(self, kind: str, session: GatewaySession, **content: Any) -> None:
        place = session.place
        self._send({"kind": kind, "epoch": self._epoch, "episode": place.episode, "attempt": place.attempt, **content})

    # --- the programs' side -------------------------------------------------------------------------------------------

    def session(self, key: str) -> GatewaySession:
        """The attempt that ``key`` belongs to. The lookup by digest reveals nothing about other keys.

        Raises:
            ApiError: there is none.
        """
        session = self._sessions.get(_digest(key))
        if session is None:
            raise ApiError(401, GONE, code="invalid_api_key")
        return session

    async def call(self, session: GatewaySession, request: Request) -> tuple[Action, int, str]:
        """The policy's answer, the number of tokens that it read, and a name for the answer.

        Raises:
            ApiError: too many calls wait, the trainer refuses this one, or the episode has ended or reached a limit.
        """
        if session.ended:
            raise ApiError(401, GONE, code="invalid_api_key")
        if session.limited:
            raise _at_its_limit()
        if len(session.calls) >= self.settings.calls_per_program:
            raise ApiError(429, f"{len(session.calls)} calls of this key wait for answers: wait for one of them")
        number, session.made = session.made, session.made + 1
        waits: asyncio.Future[tuple[Action, int]] = asyncio.get_running_loop().create_future()
        assert session.clock is not None
        if not session.calls:
            session.clock.pause()
        session.calls[number] = waits
        asked = {"prompt": request.prompt, "tools": request.tools, "sampling": request.sampling or None}
        self._tell("called", session, call=number, **asked)
        try:
            action, prompt_tokens = await waits
            session.answered[name := secrets.token_hex(12)] = number
            return action, prompt_tokens, name
        finally:
            del session.calls[number]
            if not session.calls and not session.ended:
                session.clock.go_on()

    async def next(self, wait_s: float) -> GatewaySession | None:
        """The next attempt for a service, or None if there is none within ``wait_s`` seconds.

        Raises:
            ApiError: the run starts its programs itself.
        """
        if self.settings.command:
            raise ApiError(404, "this run starts a program for each task (agent.command): there is nothing to fetch")
        if self._closed:
            return None
        found: asyncio.Future[GatewaySession] = asyncio.get_running_loop().create_future()
        self._services.append(found)
        self._fill()
        try:
            return await asyncio.wait_for(found, wait_s)
        except (TimeoutError, asyncio.TimeoutError):
            return None
        finally:
            with contextlib.suppress(ValueError):
                self._services.remove(found)

    def give_back(self, session: GatewaySession) -> None:
        """Requeue an attempt that a service fetched but did not receive."""
        if not session.ended:
            self._close(session)
            self._waiting.appendleft(session.place)
            self._fill()

    def end(self, session: GatewaySession, result: programs.Result) -> None:
        """End an attempt with its program's result.

        Raises:
            BadReward: the result names a completion that the sample does not have.
        """
        if session.ended:
            return
        answer = None
        if result.answer is not None:
            answer = session.answered.get(result.answer.rpartition("-")[2])
            if answer is None:
                raise BadReward(f"its answer {result.answer[:60]!r} is the id of none of the sample's completions")
        self._close(session)
        last = result.observation
        numbers = {"reward": last.reward, "score": last.score, "metrics": dict(last.metrics)}
        assert session.clock is not None
        self._tell("ended", session, observation=numbers, seconds=session.clock.used, answer=answer)
        self._fill()

    def fail(self, session: GatewaySession, reason: str, *, timed_out: bool = False) -> None:
        """Fail an attempt, and queue the next one if any is left."""
        if session.ended:
            return
        self._close(session)
        place = session.place
        last = place.left <= 1
        self._tell("failed", session, reason=reason, timed_out=timed_out, last=last)
        if not last:
            self._waiting.appendleft(Place(place.episode, place.attempt + 1, place.left - 1, place.task))
        self._fill()

    # --- attempts -----------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Begin attempts up to the limit of programs. Without agent.command, each needs a waiting service."""
        self._services = deque(each for each in self._services if not each.done())
        while (
            self._waiting and len(self._running) < self.settings.programs and (self.settings.command or self._services)
        ):
            session = GatewaySession(self._waiting.popleft())
            self._sessions[_digest(session.key)] = session
            self._running[session.place.episode, session.place.attempt] = session
            seconds = self.settings.episode_timeout_s
            if self.settings.command:
                late = asyncio.Event()
                session.clock = Clock(seconds, late.set)
                session.ends = asyncio.get_running_loop().create_task(self._run(session, late)).cancel
            else:
                reason = f"the service gave no reward within agent.episode_timeout_s={seconds:g} seconds of its own"
                session.clock = Clock(seconds, partial(self.fail, session, reason, timed_out=True))
                self._services.popleft().set_result(session)

    async def _run(self, session: GatewaySession, late: asyncio.Event) -> None:
        settings = self.settings
        here = ",".join(
            filter(None, (os.environ.get("NO_PROXY", os.environ.get("no_proxy")), "127.0.0.1,localhost,::1"))
        )
        variables = {
            "OPENAI_BASE_URL": settings.url, "OPENAI_API_KEY": session.key, "NO_PROXY": here, "no_proxy": here,
        }  # fmt: skip
        task, seconds = programs.as_json(session.task), settings.episode_timeout_s
        try:
            done = await programs.run(settings.command, task, variables, late, Path(settings.folder))
        except OSError as error:
            self.fail(session, f"the program cannot be started ({error}): correct agent.command")
            return
        if done.code is None:
            self.fail(
                session,
                f"the program took more than agent.episode_timeout_s={seconds:g} seconds of its own",
                timed_out=True,
            )
        elif done.code and not session.limited:
            self.fail(session, f"the program ended with {_ended_with(done)}")
        else:
            try:
                self.end(session, programs.last_line("" if done.code else done.output))
            except BadReward as error:
                self.fail(session, f"the program gave no reward: {error}")

    def _close(self, session: GatewaySession) -> None:
        """Revoke the attempt's key, fail its calls, and end its program."""
        if session.clock is not None and not session.calls:
            session.clock.pause()
        session.ended = True
        del self._sessions[_digest(session.key)]
        del self._running[session.place.episode, session.place.attempt]
        for waits in session.calls.values():
            if not waits.done():
                waits.set_exception(ApiError(401, GONE, code="invalid_api_key"))
        session.ends()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _at_its_limit() -> ApiError:
    sentence = (
        "the episode has reached a limit of the run (agent.max_turns, agent.max_tokens): there are no more answers"
    )
    return ApiError(400, sentence, code="context_length_exceeded")


def _ended_with(done: Exit) -> str:
    code = done.code or 0
    how = f"exit code {code}" if code > 0 else f"signal {-code}"
    return f"{how}: {done.last_error}" if done.last_error else how
