"""A calculator that the policy may use before it answers. A right answer earns 1."""

import ast
import json
import operator
from typing import Any

from nemo_style_rlhf.agents.environment import Action, Observation, Task
from nemo_style_rlhf.agents.environment import Environment as Base

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


class Environment(Base):
    async def reset(self, task: Task) -> Observation:
        self.answer, self.calls = task.label, 0
        return Observation()  # the policy reads the row's prompt

    async def step(self, action: Action) -> Observation:
        if calls := action.message.get("tool_calls"):
            self.calls += len(calls)
            results = [{"role": "tool", "content": result_of(call)} for call in calls]
            return Observation(results, metrics={"tool_calls": self.calls})
        right = action.text.strip() == self.answer
        return Observation(reward=float(right), done=True, metrics={"tool_calls": self.calls})


def result_of(call: dict[str, Any]) -> str:
    """The text that the policy reads after a tool call."""
    try:
        return str(calculate(json.loads(call["function"]["arguments"])["expression"]))
    except (KeyError, TypeError, ValueError, SyntaxError, RecursionError):
        return "error"


def calculate(expression: str) -> int:
    """The value of whole numbers with + - *.

    Raises:
        ValueError: it contains anything else.
        SyntaxError: it is not an expression.
    """

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(int() as number):
                return number
            case ast.BinOp(left, operation, right) if type(operation) in OPERATIONS:
                return OPERATIONS[type(operation)](value(left), value(right))
        raise ValueError(f"{expression!r} is more than whole numbers with + - *")

    return value(ast.parse(expression, mode="eval").body)
