"""A small model learns to use a calculator, since its answers are wrong without it.

    .venv-actor/bin/python examples/agents/calculator/run.py --seed 1

It first reads attempts at problems (SFT), of which half guess the answer, and then solves problems by itself, with the
calculator of examples/agents/calculator/environment.py. Everything is made here, nothing is downloaded. Results:
outputs/calculator/summary.json and curves.png.
"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[3]))

from environment import calculate
from learning import Example, Problem, main
from small_model import Message, said, tool_call

GUESSES, CARELESS_CALLS = 0.5, 0.25
"""Shares of the attempts that do not call the calculator, and that call it with half of the problem; the others are good."""


def problem(rng: random.Random) -> Problem:
    first, second, third = (rng.randint(11, 99) for _ in range(3))
    expression = f"{first} * {second} + {third}"
    return Problem(f"What is {expression}?", str(calculate(expression)))


def solution(rng: random.Random, given: Problem) -> list[Message]:
    kind, expression = rng.random(), given.question.removeprefix("What is ").removesuffix("?")
    if kind < GUESSES:
        return [said("assistant", given.answer)]
    if kind < GUESSES + CARELESS_CALLS:
        expression = " ".join(expression.split()[:3])
    result = str(calculate(expression))
    return [tool_call("calculator", expression=expression), said("tool", result), said("assistant", result)]


EXAMPLE = Example(
    name="calculator",
    description=__doc__.splitlines()[0],
    problem=problem,
    solution=solution,
    conversations=20_000,
    steps=50,
    actor={"agent.path": Path(__file__).parent / "environment.py", "algorithm.num_rollout_samples": 128},
)

if __name__ == "__main__":
    main(EXAMPLE)
