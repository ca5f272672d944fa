"""An ordinary shop assistant, written with the `openai` package. It knows nothing of training.

OPENAI_BASE_URL=... OPENAI_API_KEY=... python examples/agents/openai_program/program.py "What does part 3841 cost?"
"""

import json
import random
import sys
from typing import Any

from openai import OpenAI

TURNS = 4
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "The price of a part.",
            "parameters": {
                "type": "object",
                "properties": {"part": {"type": "string", "description": "its number, such as 3841"}},
                "required": ["part"],
            },
        },
    }
]


def price(part: str) -> str:
    """A price list that cannot be guessed."""
    return str(random.Random(part).randint(1000, 9999))


def converse(client: OpenAI, question: str) -> list[Any]:
    """The messages of a conversation of at most `TURNS` answers; the last one is the assistant's."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for left in reversed(range(TURNS)):
        message = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
        messages.append(message)
        if not message.tool_calls or not left:
            break
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": look_up(call.function.arguments)})
    return messages


def look_up(arguments: str) -> str:
    try:
        return price(json.loads(arguments)["part"])
    except (KeyError, TypeError, ValueError):
        return "error"


if __name__ == "__main__":
    print(converse(OpenAI(), sys.argv[1])[-1].content)
