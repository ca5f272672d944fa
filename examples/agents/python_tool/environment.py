"""Python that the policy may run before it answers, in the sandbox of nemo_style_rlhf/scoring/sandbox.py. A right answer earns 1.

Needs bubblewrap.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
from typing import Any

from nemo_style_rlhf.agents.environment import Action, Observation, Task
from nemo_style_rlhf.agents.environment import Environment as Base
from nemo_style_rlhf.scoring.sandbox import confined, require_sandbox

SECONDS, LETTERS = 5.0, 200

require_sandbox()  # when the trainer starts, not in its first episode


class Environment(Base):
    async def reset(self, task: Task) -> Observation:
        self.answer, self.calls = task.label, 0
        return Observation()  # the policy reads the row's prompt

    async def step(self, action: Action) -> Observation:
        if calls := action.message.get("tool_calls"):
            self.calls += len(calls)
            # In threads, since other episodes run in this process.
            results = [await asyncio.to_thread(result_of, call) for call in calls]
            return Observation(
                [{"role": "tool", "content": each} for each in results], metrics={"tool_calls": self.calls}
            )
        right = action.text.strip() == self.answer
        return Observation(reward=float(right), done=True, metrics={"tool_calls": self.calls})


def result_of(call: dict[str, Any]) -> str:
    """The text that the policy reads after a tool call: the beginning of what its program prints."""
    try:
        return run_python(json.loads(call["function"]["arguments"])["code"].encode())
    except (AttributeError, KeyError, TypeError, ValueError):
        return "error"


def run_python(code: bytes) -> str:
    with tempfile.TemporaryFile() as program, tempfile.TemporaryFile() as printed:
        program.write(code)
        program.seek(0)
        with confined([sys.executable, "-I", "-S", "-"], stdin=program, stdout=printed) as process:
            try:
                failed = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                failed = True
        printed.seek(0)
        return "error" if failed else printed.read(LETTERS).decode(errors="replace").strip()
