"""A small model learns which program answers a question, and runs it in a sandbox.

    .venv-actor/bin/python examples/agents/python_tool/run.py --seed 1

It first reads attempts at problems (SFT), whose programs are well written but mostly wrong, and then solves problems by
itself, with the Python of examples/agents/python_tool/environment.py. Everything is made here, nothing is downloaded. Results:
outputs/python_tool/summary.json and curves.png. Needs bubblewrap.
"""

import random
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[3]))

from learning import Example, Problem, main
from small_model import Message, said, tool_call

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.scoring.sandbox import require_sandbox

QUESTIONS = {
    "How many in all?": "sum(n)",
    "How many on the best day?": "max(n)",
    "How many on the worst day?": "min(n)",
    "How many more on the best day than on the worst?": "max(n) - min(n)",
}
"""Questions, each with the expression whose value is the answer."""
EXPRESSIONS = {*QUESTIONS.values(), "len(n)"}
RIGHT = 0.4
"""Share of the attempts with the right program; the others have one of the other programs."""


def problem(rng: random.Random) -> Problem:
    numbers, thing = rng.sample(range(11, 100), 3), rng.choice(("apples", "books", "cups", "pens"))
    question, expression = rng.choice([*QUESTIONS.items()])
    listed = ", ".join(map(str, numbers[:-1]))
    return Problem(f"A shop sold {listed} and {numbers[-1]} {thing}. {question}", value(expression, numbers))


def solution(rng: random.Random, given: Problem) -> list[Message]:
    numbers = [int(each) for each in re.findall(r"\d+", given.question)]
    expression = next(right for question, right in QUESTIONS.items() if given.question.endswith(question))
    if rng.random() > RIGHT:
        expression = rng.choice(sorted(EXPRESSIONS - {expression}))
    result = value(expression, numbers)
    return [
        tool_call("python", code=f"n = {numbers}; print({expression})"),
        said("tool", result),
        said("assistant", result),
    ]


def value(expression: str, numbers: list[int]) -> str:
    return str(eval(expression, {"n": numbers}))


EXAMPLE = Example(
    name="python_tool",
    description=__doc__.splitlines()[0],
    problem=problem,
    solution=solution,
    conversations=20_000,
    steps=24,
    actor={
        "agent.path": Path(__file__).parent / "environment.py",
        "algorithm.num_rollout_samples": 96,
        "engine.optim.lr": 5e-4,
        "engine.scheduler.name": "linear",
    },
)

if __name__ == "__main__":
    try:
        require_sandbox()
    except UserError as error:
        sys.exit(str(error))
    main(EXAMPLE)
