"""A program that only knows the `openai` package is trained: its model learns to look prices up, since it cannot know them.

    .venv-actor/bin/python examples/agents/openai_program/run.py --seed 1

A small model first reads conversations (SFT), of which half guess the price. Then examples/agents/openai_program/program.py
converses with it through the endpoint of the run that trains it. Everything is made here, nothing is downloaded. Results:
outputs/openai_program/summary.json and curves.png.
"""

import os
import random
import secrets
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[3]))

from learning import Example, Problem, main
from program import price
from small_model import Message, said, tool_call

from nemo_style_rlhf.launch.program import ACTOR_PYTHON, Program

GUESSES, WRONG_PARTS = 0.5, 0.25
"""Shares of the attempts that look nothing up, and that look up another part; the others are good."""


def number(rng: random.Random) -> str:
    return str(rng.randint(1000, 9999))


def problem(rng: random.Random) -> Problem:
    part = number(rng)
    return Problem(f"What does part {part} cost?", price(part))


def solution(rng: random.Random, given: Problem) -> list[Message]:
    kind, part = rng.random(), given.question.split()[3]
    if kind < GUESSES:
        return [said("assistant", number(rng))]
    if kind < GUESSES + WRONG_PARTS:
        part = number(rng)
    return [tool_call("look_up", part=part), said("tool", price(part)), said("assistant", price(part))]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def example(port: int) -> Example:
    service = [str(ACTOR_PYTHON), str(Path(__file__).parent / "service.py"), f"http://127.0.0.1:{port}"]
    return Example(
        name="openai_program",
        description=__doc__.splitlines()[0],
        problem=problem,
        solution=solution,
        conversations=20_000,
        steps=25,
        actor={"algorithm.num_rollout_samples": 128, "agent.listen": f"127.0.0.1:{port}"},
        beside=(Program("service", service),),
    )


if __name__ == "__main__":
    os.environ["NSR_AGENT_TOKEN"] = secrets.token_hex()
    main(example(free_port()))
