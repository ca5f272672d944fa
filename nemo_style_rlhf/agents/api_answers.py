"""OpenAI API answers, built from the policy's samples."""

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from nemo_style_rlhf.agents.api_requests import Offer, Request
from nemo_style_rlhf.agents.environment import Action


@dataclass(frozen=True)
class Answer:
    """An answer of the policy in each form that the API has."""

    request: Request
    action: Action
    name: str
    """Unique among the answers of the run."""
    prompt_tokens: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    def chat(self) -> dict[str, Any]:
        message = self._message()
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._chat_logprobs(),
            "finish_reason": self._reason(message),
        }
        return self._envelope("chat.completion", "chatcmpl", [choice]) | {"usage": self._usage()}

    def chat_stream(self) -> Iterator[dict[str, Any]]:
        """The chunks of a stream. The answer is complete before the first chunk."""
        message = self._message()
        calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls") or [])]
        delta = message | ({"tool_calls": calls} if calls else {})
        for part, logprobs, reason in (
            (delta, self._chat_logprobs(), None),
            ({}, None, self._reason(message)),
        ):
            choice = {"index": 0, "delta": part, "logprobs": logprobs, "finish_reason": reason}
            yield self._envelope("chat.completion.chunk", "chatcmpl", [choice])
        if self.request.with_usage:
            yield self._envelope("chat.completion.chunk", "chatcmpl", []) | {"usage": self._usage()}

    def text(self) -> dict[str, Any]:
        logprobs = None
        if self.request.logprobs:
            tokens = [_token(token) for token in self.action.token_ids]
            logprobs = {
                "tokens": tokens,
                "token_logprobs": [*self.action.logprobs],
                "top_logprobs": None,
                "text_offset": None,
            }
        reason = "length" if self.action.truncated else "stop"
        choice = {"index": 0, "text": self.action.text, "logprobs": logprobs, "finish_reason": reason}
        return self._envelope("text_completion", "cmpl", [choice]) | {"usage": self._usage()}

    def text_stream(self) -> Iterator[dict[str, Any]]:
        whole = self.text()
        usage = whole.pop("usage")
        yield whole
        if self.request.with_usage:
            yield {**whole, "choices": [], "usage": usage}

    def _envelope(self, kind: str, prefix: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{self.name}",
            "object": kind,
            "created": self.created,
            "model": self.request.model,
            "choices": choices,
        }

    def _usage(self) -> dict[str, int]:
        sampled = len(self.action.token_ids)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": self.prompt_tokens + sampled,
        }

    def _message(self) -> dict[str, Any]:
        """The message, with the arguments of tool calls as JSON and an id for each call."""
        message = {"role": "assistant", "content": self.action.text, **self.action.message}
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [self._call(call, number) for number, call in enumerate(calls)]
            message["content"] = message["content"] or None
        else:
            message.pop("tool_calls", None)
        return message

    def _call(self, call: dict[str, Any], number: int) -> dict[str, Any]:
        """The id depends only on the conversation, like everything else that a template may write."""
        function = {**call.get("function", call)}
        arguments = function.get("arguments")
        function["arguments"] = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
        key = json.dumps([self.request.prompt, number], sort_keys=True).encode()
        return {
            "id": call.get("id") or f"call_{hashlib.sha256(key).hexdigest()[:24]}",
            "type": "function",
            "function": function,
        }

    def _reason(self, message: dict[str, Any]) -> str:
        if self.action.truncated:
            return "length"
        return "tool_calls" if message.get("tool_calls") else "stop"

    def _chat_logprobs(self) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        tokens: list[dict[str, Any]] = [
            {"token": _token(token), "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(self.action.token_ids, self.action.logprobs)
        ]
        return {"content": tokens, "refusal": None}


def models(offer: Offer) -> dict[str, Any]:
    """The answer to /v1/models."""
    model = {"id": offer.model, "object": "model", "created": 0, "owned_by": "nemo_style_rlhf"}
    return {"object": "list", "data": [model]}


def _token(token: int) -> str:
    """A token in a list of log-probabilities. Its bytes may not be valid text on their own; the id names it exactly."""
    return f"token_id:{token}"
