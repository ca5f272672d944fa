"""Messages between trainer and episode worker: JSON lines over a socket, and shared memory. Imports no torch."""

import dataclasses
import json
import mmap
from collections.abc import Mapping
from typing import Any

from nemo_style_rlhf.agents.environment import Action, Observation, Task

MEMORY_BYTES = 24
LONGEST_LINE = 16 * 2**20
"""Maximum bytes of an observation as JSON."""
LINE_LIMIT = 2**31
"""Maximum bytes of a line from the trainer. The rows and responses in it are the trainer's own."""


class SharedState:
    """State in memory that trainer and worker share, so that the trainer can read it after the worker's death."""

    def __init__(self, descriptor: int) -> None:
        memory = mmap.mmap(descriptor, MEMORY_BYTES)
        self._whole, self._seconds = memoryview(memory).cast("q"), memoryview(memory).cast("d")

    @property
    def running(self) -> int:
        """Number of the attempt whose code the event loop executes right now; 0 while it executes none."""
        return self._whole[0]

    @property
    def since(self) -> float:
        """``time.monotonic()`` when that execution began. All processes of the machine share this clock."""
        return self._seconds[1]

    @property
    def alive(self) -> float:
        """``time.monotonic()`` of the event loop's last tick; 0 before the first."""
        return self._seconds[2]

    @alive.setter
    def alive(self, seconds: float) -> None:
        self._seconds[2] = seconds

    def enter(self, attempt: int, now: float) -> None:
        """Mark ``attempt`` as running."""
        self._seconds[1] = now
        self._whole[0] = attempt

    def leave(self) -> None:
        """Mark that no attempt runs."""
        self._whole[0] = 0


def line(message: Mapping[str, Any]) -> bytes:
    """Encode a message of the trainer. A value without a JSON type, such as a row's time, becomes a list or its text."""
    return json.dumps(message, default=_as_json).encode() + b"\n"


def _as_json(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def task_fields(task: Task) -> dict[str, Any]:
    return {field.name: getattr(task, field.name) for field in dataclasses.fields(task)} | {"row": dict(task.row)}


def read_task(fields: dict[str, Any]) -> Task:
    return Task(**{**fields, "messages": tuple(fields["messages"])})


def action_fields(action: Action) -> dict[str, Any]:
    return {field.name: getattr(action, field.name) for field in dataclasses.fields(action)}


def read_action(fields: dict[str, Any]) -> Action:
    whole = {**fields, "token_ids": tuple(fields["token_ids"]), "logprobs": tuple(fields["logprobs"])}
    return Action(**whole)


def observation_fields(observation: Observation) -> dict[str, Any]:
    return {field.name: getattr(observation, field.name) for field in dataclasses.fields(observation)}


def read_observation(fields: dict[str, Any]) -> Observation:
    messages = fields["messages"]
    return Observation(**{**fields, "messages": messages if isinstance(messages, str) else tuple(messages)})
