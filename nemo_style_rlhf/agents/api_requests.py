"""OpenAI API requests that a policy in training can serve. Uses neither sockets nor tokenizers.

A request for anything that changes the distribution of the samples, such as another temperature, is refused: the policy could not
be trained on them. Fields that change nothing, such as `user`, are ignored. Unknown fields are refused.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from nemo_style_rlhf.wire.reading import Expected, Fault, Flag, Many, parse

DEEPEST = 64
"""Maximum nesting of lists and objects in a request."""
MOST_STOPS = 16
LONGEST_WAIT_S = 60.0
"""Maximum seconds that /sessions/next may wait."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
IGNORED = {
    "metadata", "prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user",
}  # fmt: skip
"""Request fields that do not change samples."""
KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""Error types by status; `server_error` from 500 up."""


class ApiError(Exception):
    """A request must be answered with this error."""

    def __init__(self, status: int, sentence: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(sentence)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, KINDS[400] if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Offer:
    """The run's sampling settings."""

    model: str = "policy"
    """Name in the list of models. Requests may name any model."""
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
    """`max_length` and `stop`, if the request sets them."""
    model: str = ""
    stream: bool = False
    with_usage: bool = False
    """True if a stream ends with the number of tokens."""
    logprobs: bool = False


def read_json(raw: bytes) -> dict[str, Any]:
    """Parse the JSON object of a body.

    Raises:
        ApiError: there is none, it is nested too deeply, or it has numbers or characters that JSON and UTF-8 do not have.
    """
    try:
        content = json.loads(raw.decode())
        _check(content)
    except UnicodeDecodeError as error:
        raise ApiError(400, "the body is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        reason = str(error) if type(error) is ValueError else "expected an object"
        raise ApiError(400, f"the body cannot be read as JSON: {reason[:100]}") from error
    if not isinstance(content, dict):
        raise ApiError(400, "the body must be a JSON object")
    return content


def _check(content: Any) -> None:
    """Raise ValueError if ``content`` is too deep, or holds numbers or characters that neither JSON nor UTF-8 has."""
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
    """Read a request to /v1/chat/completions.

    Raises:
        ApiError: it is invalid, or asks for something that cannot be trained.
    """
    fixed = {
        **_fixed(offer),
        "response_format": Fixed([{"type": "text"}], "the policy writes plain text"),
        "modalities": Fixed([["text"]], "the policy writes plain text"),
        "top_logprobs": Fixed([0], "only the log-probabilities of the sampled tokens are known"),
        "tool_choice": Fixed(
            ["auto"] if body.get("tools") else ["auto", "none"], "the policy chooses by itself: leave it out"
        ),
        "parallel_tool_calls": Fixed([True], "the policy chooses by itself: leave it out"),
    }
    asked = _read(body, ChatBody, fixed)
    if asked.messages[-1]["role"] == "assistant":
        raise ApiError(
            400, "the conversation ends with the assistant's message: there is nothing to answer", param="messages"
        )
    limits = [_limit(asked, name, offer) for name in ("max_completion_tokens", "max_tokens")]
    limit = min((each for each in limits if each), default=None)
    return _request(asked, asked.messages, limit, tools=asked.tools or None, logprobs=asked.logprobs)


def read_text(body: Mapping[str, Any], offer: Offer) -> Request:
    """Read a request to /v1/completions; the prompt is a text, or token ids.

    Raises:
        ApiError: it is invalid, or asks for something that cannot be trained.
    """
    fixed = {
        **_fixed(offer),
        "best_of": Fixed([1], "a request gets one answer"),
        "echo": Fixed([False], "an answer is what the policy wrote"),
        "suffix": Fixed([""], "the policy writes from left to right"),
        "logprobs": Fixed([0], "only the log-probabilities of the sampled tokens are known, which logprobs=0 gives"),
    }
    asked = _read(body, TextBody, fixed)
    prompt: Any = asked.prompt
    if isinstance(prompt, list) and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    return _request(asked, prompt, _limit(asked, "max_tokens", offer), logprobs=body.get("logprobs") is not None)


@dataclass(frozen=True)
class Fixed:
    """A field that requests may only set to the run's own values."""

    possible: Sequence[Any]
    reason: str


def _fixed(offer: Offer) -> dict[str, Fixed]:
    return {
        "n": Fixed([1], "a request gets one answer"),
        "temperature": Fixed([offer.temperature], f"this run samples with {offer.temperature:g}: leave it out"),
        "top_p": Fixed([offer.top_p], f"this run samples with {offer.top_p:g}: leave it out"),
        "presence_penalty": Fixed([0], "samples with a penalty cannot be trained"),
        "frequency_penalty": Fixed([0], "samples with a penalty cannot be trained"),
        "logit_bias": Fixed([{}], "samples with a bias cannot be trained"),
        "seed": Fixed([], "seeds follow from the run's seed and the content of the request: leave it out"),
    }


def _is_function(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("type", "function") != "function":
        return False
    function = value.get("function")
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _is_message(message: Any) -> bool:
    """Return True for a valid message. Raise ValueError otherwise, as :class:`Expected` describes."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise ValueError(f"an object whose role is one of {', '.join(ROLES)}")
    for name in ("name", "tool_call_id"):
        if not isinstance(message.get(name), str | None):
            raise ValueError("a text", f".{name}")
    content, calls = message.get("content"), message.get("tool_calls")
    if calls is not None:
        right = message["role"] == "assistant" and isinstance(calls, list) and all(map(_is_function, calls))
        if not right or not all(isinstance(call["function"].get("arguments"), str | dict) for call in calls):
            raise ValueError("calls of functions, with name and arguments, in an assistant's message", ".tool_calls")
    if isinstance(content, list):
        right = all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content)
    else:
        right = isinstance(content, str) or (content is None and message["role"] == "assistant")
    if not right:
        raise ValueError("a text, or parts of text", ".content")
    return True


def _is_prompt(prompt: str | list[Any]) -> bool:
    """Return True for a text, token ids, or a list of one of them."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    if isinstance(prompt, str):
        return True
    return bool(prompt) and all(type(token) is int and 0 <= token < 2**31 for token in prompt)


Limit = Annotated[int | None, Expected("a number of tokens from 1 to the run's generation.max_length")]


@dataclass(frozen=True, kw_only=True)
class CommonBody:
    """Fields of both kinds of requests, except the :class:`Fixed` ones. A null field counts as absent."""

    model: Annotated[str, Expected("a name")] = ""
    stream: Flag = False
    stream_options: Annotated[
        dict[str, Any],
        Expected(
            "an object with include_usage",
            lambda value: (
                value.keys() <= {"include_usage", "include_obfuscation"}
                and all(each is None or isinstance(each, bool) for each in value.values())
            ),
        ),
    ] = field(default_factory=dict)
    stop: Annotated[
        str | Many[str] | None,
        Expected(
            f"a text, or a list of at most {MOST_STOPS}, none of them empty",
            lambda value: bool(value) if isinstance(value, str) else len(value) <= MOST_STOPS and all(value),
        ),
    ] = None
    max_tokens: Limit = None


@dataclass(frozen=True, kw_only=True)
class ChatBody(CommonBody):
    messages: Annotated[
        Many[Annotated[Any, Expected("a message", _is_message)]],
        Expected("a list with at least one message", bool),
    ]
    tools: Annotated[
        list[Any],
        Expected(
            "a list of objects with type=function and a function with a name",
            lambda value: all(map(_is_function, value)),
        ),
    ] = field(default_factory=list)
    logprobs: Flag = False
    max_completion_tokens: Limit = None


@dataclass(frozen=True, kw_only=True)
class TextBody(CommonBody):
    prompt: Annotated[str | list[Any], Expected("a text, or a list of token ids", _is_prompt)]


@dataclass(frozen=True)
class NextBody:
    """Body of /sessions/next, the request for a task."""

    wait_s: Annotated[
        float,
        Expected(f"a number of seconds from 0 to {LONGEST_WAIT_S:g}", lambda value: 0 <= value <= LONGEST_WAIT_S),
    ] = 20.0


@dataclass(frozen=True)
class FailBody:
    """Body of /sessions/fail. The request ends an attempt that has failed."""

    reason: Annotated[str, Expected("a text")] = "no reason given"


Body = TypeVar("Body")


def _read(body: Mapping[str, Any], kind: type[Body], fixed: Mapping[str, Fixed]) -> Body:
    given = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    for name, its in fixed.items():
        if name in given and not any(_same(given[name], possible) for possible in its.possible):
            raise ApiError(
                400, f"{name}={_shown(given[name])} is not possible: {its.reason}", param=name, code="unsupported_value"
            )
        given.pop(name, None)
    return read_typed(given, kind)


def read_typed(given: Mapping[str, Any], kind: type[Body]) -> Body:
    """Read ``given`` as the dataclass ``kind``. Raise :class:`ApiError` if it holds something else."""
    try:
        return parse(given, kind)
    except Fault as fault:
        if fault.kind == "unknown":
            raise ApiError(
                400,
                f"{_shown(fault.field)} is not known here: leave it out",
                param=fault.field[:60],
                code="unknown_parameter",
            ) from None
        raise _wrong(fault.field, fault.expected, given.get(fault.field)) from None


def _request(
    asked: CommonBody, prompt: Any, limit: int | None, *, tools: list[dict[str, Any]] | None = None, logprobs: bool
) -> Request:
    sampling: dict[str, Any] = {} if limit is None else {"max_length": limit}
    if asked.stop:
        sampling["stop"] = [asked.stop] if isinstance(asked.stop, str) else asked.stop
    usage = bool(asked.stream_options.get("include_usage"))
    return Request(prompt, tools, sampling, asked.model, asked.stream, usage, logprobs)


def _limit(asked: CommonBody, name: str, offer: Offer) -> int | None:
    value: int | None = getattr(asked, name)
    if value is not None and not 1 <= value <= offer.max_length:
        raise _wrong(name, f"a number of tokens from 1 to {offer.max_length}", value)
    return value


def _same(value: Any, possible: Any) -> bool:
    """Return True if both are equal. Unlike in Python, true does not equal 1."""
    return isinstance(value, bool) == isinstance(possible, bool) and bool(value == possible)


def _wrong(name: str, expected: str, value: Any = None) -> ApiError:
    given = "" if value is None else f"={_shown(value)}"
    return ApiError(
        400, f"{name[:60]}{given} is not possible: expected {expected}", param=name[:60], code="invalid_value"
    )


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
