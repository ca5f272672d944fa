"""Requests of the OpenAI API, as far as a policy in training can serve them. Neither sockets nor tokenizers here.

A request that asks for anything that changes the distribution of the samples, such as another temperature, is refused: the policy
could not be trained on them. Fields that change nothing, such as `user`, are passed over, and unknown fields are refused.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

DEEPEST = 64
"""Levels of lists and objects in a request."""
MOST_STOPS = 16
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
IGNORED = {
    "metadata", "prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user",
}  # fmt: skip
"""Fields of requests that change no sample."""
KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""Types of errors by status; `server_error` from 500 on."""


class Refused(Exception):
    """A request that gets an error for an answer."""

    def __init__(self, status: int, sentence: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(sentence)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, KINDS[400] if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Offer:
    """The settings with which the run samples."""

    model: str = "policy"
    """Name in the list of models. Requests may name any."""
    temperature: float = 1.0
    top_p: float = 1.0
    max_length: int = 1024
    """Maximum tokens of an answer."""


@dataclass(frozen=True)
class Request:
    """A request that can be served."""

    prompt: list[dict[str, Any]] | list[int] | str
    tools: list[dict[str, Any]] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    """`max_length` and `stop` where the request sets them."""
    model: str = ""
    stream: bool = False
    with_usage: bool = False
    """Whether a stream ends with the number of tokens."""
    logprobs: bool = False


def read_json(raw: bytes) -> dict[str, Any]:
    """The object that a body holds.

    Raises:
        Refused: it holds none, or one that is nested too deeply, or numbers or characters that JSON and UTF-8 do not have.
    """
    try:
        content = json.loads(raw.decode())
        _check(content)
    except UnicodeDecodeError as error:
        raise Refused(400, "the body is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        reason = str(error) if type(error) is ValueError else "expected an object"
        raise Refused(400, f"the body cannot be read as JSON: {reason[:100]}") from error
    if not isinstance(content, dict):
        raise Refused(400, "the body must be a JSON object")
    return content


def _check(content: Any) -> None:
    """
    Raises:
        ValueError: ``content`` is too deep, or holds numbers or characters that neither JSON nor UTF-8 has.
    """
    left = [(content, 1)]
    while left:
        value, depth = left.pop()
        if isinstance(value, dict | list):
            if depth > DEEPEST:
                raise ValueError(f"it is nested more than {DEEPEST} deep")
            inner = [*value, *value.values()] if isinstance(value, dict) else value
            left += [(each, depth + 1) for each in inner]
        elif isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError("a text has half of a surrogate pair") from None
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError("a number is not finite")


def read_chat(body: Mapping[str, Any], offer: Offer) -> Request:
    """A request to /v1/chat/completions.

    Raises:
        Refused: it is wrong, or asks for what cannot be trained.
    """
    _refuse_unknown(body, _CHAT | _COMMON)
    _check_sampling(body, offer)
    _only(body, "response_format", lambda value: value == {"type": "text"}, "the policy writes plain text")
    _only(body, "modalities", lambda value: value == ["text"], "the policy writes plain text")
    _only(body, "top_logprobs", _is(0), "only the log-probabilities of the sampled tokens are known")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", "a list with at least one message")
    for number, message in enumerate(messages):
        _check_message(message, f"messages[{number}]")
    if messages[-1]["role"] == "assistant":
        raise Refused(
            400, "the conversation ends with the assistant's message: there is nothing to answer", param="messages"
        )
    tools = _tools(body)
    _only(
        body,
        "tool_choice",
        lambda value: value == "auto" or (value == "none" and not tools),
        "the policy chooses by itself: leave it out",
    )
    _only(body, "parallel_tool_calls", lambda value: value is True, "the policy chooses by itself: leave it out")
    limits = [_limit(body, name, offer) for name in ("max_completion_tokens", "max_tokens")]
    return _request(
        body, messages, tools, _flag(body, "logprobs"), min((each for each in limits if each), default=None)
    )


def read_text(body: Mapping[str, Any], offer: Offer) -> Request:
    """A request to /v1/completions; the prompt is a text, or token ids.

    Raises:
        Refused: it is wrong, or asks for what cannot be trained.
    """
    _refuse_unknown(body, _TEXT | _COMMON)
    _check_sampling(body, offer)
    _only(body, "best_of", _is(1), "a request gets one answer")
    _only(body, "echo", lambda value: value is False, "an answer is what the policy wrote")
    _only(body, "suffix", lambda value: value == "", "the policy writes from left to right")
    _only(
        body, "logprobs", _is(0), "only the log-probabilities of the sampled tokens are known, which logprobs=0 gives"
    )
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list) and not (prompt and all(type(token) is int and 0 <= token < 2**31 for token in prompt)):
        raise _wrong("prompt", "a text, or a list of token ids")
    if not isinstance(prompt, str | list):
        raise _wrong("prompt", "a text, or a list of token ids")
    return _request(body, prompt, None, body.get("logprobs") is not None, _limit(body, "max_tokens", offer))


_COMMON = IGNORED | {
    "frequency_penalty", "logit_bias", "model", "n", "presence_penalty", "seed", "stop", "stream", "stream_options",
    "temperature", "top_p", "max_tokens", "logprobs",
}  # fmt: skip
_CHAT = {
    "messages", "max_completion_tokens", "modalities", "parallel_tool_calls", "response_format", "tool_choice", "tools",
    "top_logprobs",
}  # fmt: skip
_TEXT = {"best_of", "echo", "prompt", "suffix"}


def _request(
    body: Mapping[str, Any],
    prompt: list[dict[str, Any]] | list[int] | str,
    tools: list[dict[str, Any]] | None,
    logprobs: bool,
    limit: int | None,
) -> Request:
    stop = body.get("stop")
    stop = [stop] if isinstance(stop, str) else stop
    right = stop is None or (isinstance(stop, list) and all(isinstance(each, str) and each for each in stop))
    if not right or len(stop or ()) > MOST_STOPS:
        raise _wrong("stop", f"a text, or a list of at most {MOST_STOPS}, none of them empty")
    sampling = {} if limit is None else {"max_length": limit}
    options = body.get("stream_options") or {}
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise _wrong("stream_options", "an object with include_usage")
    model = body.get("model") or ""
    if not isinstance(model, str):
        raise _wrong("model", "a name")
    return Request(
        prompt,
        tools,
        sampling | ({"stop": stop} if stop else {}),
        model,
        _flag(body, "stream"),
        _flag(options, "include_usage"),
        logprobs,
    )


def _check_sampling(body: Mapping[str, Any], offer: Offer) -> None:
    _only(body, "n", _is(1), "a request gets one answer")
    for name, of_run in (("temperature", offer.temperature), ("top_p", offer.top_p)):
        _only(body, name, _is(of_run), f"this run samples with {of_run:g}: leave it out")
    for name in ("presence_penalty", "frequency_penalty"):
        _only(body, name, _is(0), "samples with a penalty cannot be trained")
    _only(body, "logit_bias", lambda value: value == {}, "samples with a bias cannot be trained")
    _only(
        body,
        "seed",
        lambda value: False,
        "seeds follow from the run's seed and the content of the request: leave it out",
    )


def _only(body: Mapping[str, Any], name: str, possible: Callable[[Any], bool], reason: str) -> None:
    value = body.get(name)
    if value is not None and not possible(value):
        raise Refused(400, f"{name}={_shown(value)} is not possible: {reason}", param=name, code="unsupported_value")


def _is(number: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value == number


def _refuse_unknown(body: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(name for name, value in body.items() if name not in known and value is not None)
    if unknown:
        name = _shown(unknown[0])
        raise Refused(400, f"{name} is not known here: leave it out", param=unknown[0][:60], code="unknown_parameter")


def _limit(body: Mapping[str, Any], name: str, offer: Offer) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or not 1 <= value <= offer.max_length:
        raise _wrong(name, f"a number of tokens from 1 to {offer.max_length}", value)
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return bool(value)


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools = body.get("tools")
    if not tools and (tools is None or isinstance(tools, list)):
        return None
    if not isinstance(tools, list) or not all(_is_function(tool) for tool in tools):
        raise _wrong("tools", "a list of objects with type=function and a function with a name")
    return tools


def _is_function(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("type", "function") != "function":
        return False
    function = value.get("function")
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise _wrong(where, f"an object whose role is one of {', '.join(ROLES)}")
    content, calls = message.get("content"), message.get("tool_calls")
    for name in ("name", "tool_call_id"):
        if not isinstance(message.get(name, ""), str | None):
            raise _wrong(f"{where}.{name}", "a text")
    if calls is not None:
        right = message["role"] == "assistant" and isinstance(calls, list) and all(map(_is_function, calls))
        if not right or not all(isinstance(call["function"].get("arguments"), str | dict) for call in calls):
            raise _wrong(
                f"{where}.tool_calls", "calls of functions, with name and arguments, in an assistant's message"
            )
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise _wrong(f"{where}.content", "a text, or parts of text")
    elif not isinstance(content, str) and not (content is None and message["role"] == "assistant"):
        raise _wrong(f"{where}.content", "a text, or parts of text")


def _wrong(name: str, expected: str, value: Any = None) -> Refused:
    given = "" if value is None else f"={_shown(value)}"
    return Refused(400, f"{name}{given} is not possible: expected {expected}", param=name, code="invalid_value")


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
