"""Tool calls in a response, found by the parsers that vLLM has for the formats of public models."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_style_rlhf.errors import UserError


def tool_call_reader(
    name: str, tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]] | None = None
) -> Callable[[str, Sequence[int]], dict[str, Any]]:
    """A function that makes the assistant's message of a response, given as text without special tokens and as token ids. The
    message has ``tool_calls``, if the parser finds any, in the form of the OpenAI API; a response that the parser cannot read is
    a plain answer.

    Args:
        tools: JSON schemas of the tools; some parsers read the types of arguments from them.

    Raises:
        UserError: vLLM knows no parser of that name, or it does not take this tokenizer.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    known: dict[str, Any] = {"tools": tools, "tool_choice": "auto"} if tools else {}  # vLLM refuses an empty list
    try:
        request = ChatCompletionRequest(messages=[], model="policy", **known)
        parser = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools)
    except KeyError as error:
        raise UserError(
            f"agent.tool_parser={name} is unknown to vLLM: expected one of {', '.join(ToolParserManager.list_registered())}"
        ) from error
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"agent.tool_parser={name} does not fit the model's tokenizer ({error}): choose another parser"
        ) from error

    # They log a traceback for every call that they cannot read, and a policy in training writes many.
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)

    def read(text: str, token_ids: Sequence[int]) -> dict[str, Any]:
        marked = str(tokenizer.decode(list(token_ids)))  # some formats mark a call by special tokens
        found = parser.extract_tool_calls(marked, request)
        if not found.tools_called:
            return {"role": "assistant", "content": text}
        calls = [
            {
                "id": f"call-{number}",
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for number, call in enumerate(found.tool_calls)
        ]
        return {"role": "assistant", "content": found.content or "", "tool_calls": calls}

    return read
