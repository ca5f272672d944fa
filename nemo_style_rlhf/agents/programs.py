"""The user's program of one episode. It reads its task, and its last line of output is its reward."""

import asyncio
import json
import math
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from nemo_style_rlhf.agents.environment import Observation
from nemo_style_rlhf.processes.child import ChildProcess
from nemo_style_rlhf.wire.reading import Expected, Fault, parse

KEPT_BYTES = 2**20
"""Bytes kept from the end of a program's output."""
SHOWN = 300
"""Maximum characters of a program's error in a message."""
FORMS = "a JSON number, or an object with reward, score, metrics and answer"


class BadReward(Exception):
    """A reward is invalid. The message is a sentence for the user."""


@dataclass(frozen=True)
class Exit:
    """The end of a program."""

    code: int | None
    """Exit code, negative for a signal; None if its time was over."""
    output: str
    errors: str

    @property
    def last_error(self) -> str:
        """Last line of standard error, or nothing."""
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return lines[-1][:SHOWN] if lines else ""


class _Tail:
    """Reads a pipe to its end and keeps the last bytes."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.content = bytearray()
        os.set_blocking(descriptor, False)
        asyncio.get_running_loop().add_reader(descriptor, self.read)

    def read(self) -> bool:
        """Read once. Return True if there may be more."""
        try:
            data = os.read(self._descriptor, 2**16)
        except BlockingIOError:
            return False
        self.content += data
        del self.content[:-KEPT_BYTES]
        if not data:
            asyncio.get_running_loop().remove_reader(self._descriptor)
        return bool(data)

    def rest(self) -> str:
        """Read what is available by now, stop reading, and return the text."""
        while self.read():
            pass
        asyncio.get_running_loop().remove_reader(self._descriptor)
        return self.content.decode(errors="replace")


async def run(
    command: Sequence[str], task: str, variables: Mapping[str, str], late: asyncio.Event, folder: Path
) -> Exit:
    """Run a program to its end, or until ``late`` is set. All its processes have ended when this returns or is cancelled.

    Args:
        task: text for its standard input.
        variables: environment variables, added to this process's environment.
        folder: its working directory.

    Raises:
        OSError: it cannot be started.
    """
    # In a thread, since it takes 30 ms. If this is cancelled meanwhile, the program ends when its unused object is dropped.
    program = await asyncio.to_thread(_started, command, task, {**os.environ, **variables}, folder)
    assert program.stdout is not None and program.stderr is not None
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    with program.stdout, program.stderr:
        try:
            loop.add_reader(program.fileno(), ended.set)
            tails = _Tail(program.stdout.fileno()), _Tail(program.stderr.fileno())
            waits = [asyncio.ensure_future(event.wait()) for event in (ended, late)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        finally:
            loop.remove_reader(program.fileno())
            code = await asyncio.to_thread(program.kill)
            output, errors = (tail.rest() for tail in tails)
    return Exit(code if ended.is_set() else None, output, errors)


def _started(command: Sequence[str], task: str, environment: Mapping[str, str], folder: Path) -> ChildProcess:
    with open(os.memfd_create("task"), "w+b") as stdin:
        stdin.write(task.encode())
        stdin.seek(0)
        return ChildProcess(
            command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=folder
        )


@dataclass(frozen=True)
class Result:
    """A program's result at the end of its episode."""

    observation: Observation
    answer: str | None = None
    """Id of the completion that is the sample's answer."""


@dataclass(frozen=True)
class Verdict:
    """The end of an episode as a program or service reports it."""

    reward: Annotated[float, Expected("finite numbers for reward and score")] = 0.0
    score: Annotated[float | None, Expected("finite numbers for reward and score")] = None
    metrics: Annotated[
        dict[str, Any],
        Expected("an object of finite numbers for metrics", lambda metrics: all(map(_is_number, metrics.values()))),
    ] = field(default_factory=dict)
    answer: Annotated[str | None, Expected("the id of a completion for answer")] = None


def result(given: Any) -> Result:
    """Read the end of an episode from a JSON number, or an object of reward, score, metrics and answer.

    Raises:
        BadReward: it is neither.
    """
    try:
        if isinstance(given, dict) and not given.get("metrics", True):  # some languages write an empty object as a list
            given = {name: value for name, value in given.items() if name != "metrics"}
        told = Verdict(float(given)) if _is_number(given) else parse(given, Verdict)
    except Fault as fault:
        raise BadReward(f"expected {fault.expected if fault.kind == 'value' else FORMS}") from None
    metrics = {name: float(value) for name, value in told.metrics.items()}
    return Result(Observation(reward=told.reward, done=True, score=told.score, metrics=metrics), told.answer)


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def last_line(output: str) -> Result:
    """Read the end of an episode from the last line that a program wrote. The reward is 0 if it wrote none.

    Raises:
        BadReward: the line is not a reward.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if not lines:
        return Result(Observation(done=True))
    try:
        return result(json.loads(lines[-1]))
    except (ValueError, RecursionError):
        reason = f"expected {FORMS}"
    except BadReward as error:
        reason = str(error)
    raise BadReward(f"its last line {lines[-1][:60]!r} is no reward: {reason}")


def as_json(value: object) -> str:
    """Encode as JSON. A value without a JSON type, such as a row's time, becomes its text."""
    return json.dumps(value, default=str)
