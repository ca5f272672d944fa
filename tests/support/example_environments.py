"""Environments of examples/agents, loaded and played as an episode worker does."""

import asyncio
import importlib.util
import json

from nemo_style_rlhf.agents.environment import Action, Task
from tests.support.paths import ROOT


def load(example):
    spec = importlib.util.spec_from_file_location(
        f"{example}_environment", ROOT / "examples" / "agents" / example / "environment.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer(text):
    return Action(text, {"role": "assistant", "content": text})


def call(**arguments):
    """An action that calls a tool, as agent.tool_parser reads it."""
    function = {"name": "tool", "arguments": json.dumps(arguments)}
    return Action("", {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]})


def play(module, label, *actions):
    """What the environment answers to each of the actions."""

    async def episode():
        environment = module.Environment()
        assert not (await environment.reset(Task("?", label=label))).messages
        return [await environment.step(action) for action in actions]

    return asyncio.run(episode())
