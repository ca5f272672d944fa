"""Reads JSON from the network into typed messages: known fields, exact types, and one sentence about what is wrong."""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, TypeVar, get_type_hints

from pydantic import ConfigDict, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, ErrorDetails
from pydantic_core.core_schema import no_info_after_validator_function

from nemo_style_rlhf.transport.messages import Array, Code, ProtocolError

LARGEST_BYTES = 16 * 2**20
SHOWN = 60
"""Characters of a wrong value in a sentence."""
Message = TypeVar("Message")


def message(kind: type[Message]) -> type[Message]:
    """Decorates a dataclass that :func:`read` reads. Making one in Python checks nothing."""
    kind.__pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)  # type: ignore[attr-defined]
    return kind


@dataclass(frozen=True)
class Expected:
    """A field's annotation: what it must be, in the words of an error, and a condition beyond its type."""

    words: str
    holds: Callable[[Any], bool] = lambda _: True

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, value: Any) -> Any:
        if not self.holds(value):
            raise ValueError(self.words)
        return value


def read(tensor: Array, kind: type[Message], name: str = "request") -> Message:
    """Read the JSON object in a BYTES [1] tensor as a :func:`message`.

    Raises:
        ProtocolError: INVALID, naming the field.
    """
    if tensor.shape != (1,):
        raise _invalid(f"{name} has shape {list(tensor.shape)}, expected [1]")
    raw: bytes = tensor.item(0)
    if len(raw) > LARGEST_BYTES:
        raise _invalid(f"{name} has {len(raw)} bytes, expected at most {LARGEST_BYTES}")
    try:
        found: Message = _adapter(kind).validate_json(raw)  # type: ignore[arg-type]  # classes are hashable
    except ValidationError as error:
        raise _invalid(_sentence(error.errors(include_url=False, include_context=False), raw, kind, name)) from None
    return found


def _sentence(errors: list[ErrorDetails], raw: bytes, kind: type[Any], name: str) -> str:
    """About a field that is unknown if there is one, else about the first that is wrong."""
    error = next((each for each in errors if each["type"] == "unexpected_keyword_argument"), errors[0])
    if not error["loc"]:
        return f"{name} is not valid JSON" if error["type"] == "json_invalid" else f"{name} is not a JSON object"
    field = str(error["loc"][0])
    if error["type"] == "unexpected_keyword_argument":
        return f"{name} has the unknown field {field[:50]!r}, expected {', '.join(each.name for each in fields(kind))}"
    if error["type"] == "missing":
        return f"{name}.{field} is missing"
    words = _words(kind)[field]  # type: ignore[arg-type]
    return f"{name}.{field} is {_shown(raw, field)}, expected {words}"


def _shown(raw: bytes, field: str) -> str:
    try:
        value = json.dumps(json.loads(raw)[field])
    except (ValueError, RecursionError):  # Python reads no numbers of thousands of digits
        return "too long"
    return value if len(value) <= SHOWN else value[: SHOWN - 3] + "..."


@cache
def _words(kind: Any) -> dict[str, str]:
    """What each field must be."""
    hints = get_type_hints(kind, include_extras=True)
    noted = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {
        name: next((each.words for each in found if isinstance(each, Expected)), str(hints[name]))
        for name, found in noted.items()
    }


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _invalid(sentence: str) -> ProtocolError:
    return ProtocolError(Code.INVALID, sentence)
