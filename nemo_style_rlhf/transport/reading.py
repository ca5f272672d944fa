"""Reads JSON from the network into typed messages: known fields, exact types, and one sentence about what is wrong."""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, TypeVar, get_type_hints

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


@dataclass(eq=False)
class Fault(Exception):
    """What is wrong with a message."""

    kind: Literal["syntax", "object", "unknown", "missing", "value"]
    """It is not JSON, is not an object, has an unknown field, lacks one, or a field has a wrong value."""
    field: str = ""
    """``prices``, or ``prices[3]`` where one element of a list is wrong."""
    expected: str = ""


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
        return parse(raw, kind)
    except Fault as fault:
        raise _invalid(_sentence(fault, raw, name)) from None


def parse(raw: bytes, kind: type[Message]) -> Message:
    """Read a JSON object as a :func:`message`.

    Raises:
        Fault: an unknown field if there is one, else the first field that is wrong.
    """
    try:
        found: Message = _adapter(kind).validate_json(raw)  # type: ignore[arg-type]  # classes are hashable
    except ValidationError as error:
        raise _fault(error.errors(include_url=False), kind) from None
    return found


def _fault(errors: list[ErrorDetails], kind: type[Any]) -> Fault:
    unknown = (each for each in errors if each["type"] == "unexpected_keyword_argument")
    error = next(unknown, errors[0])
    if not error["loc"]:
        return Fault("syntax" if error["type"] == "json_invalid" else "object")
    field, *inside = error["loc"]
    if error["type"] == "unexpected_keyword_argument":
        return Fault("unknown", str(field), ", ".join(each.name for each in fields(kind)))
    words = _words(kind)[str(field)]  # type: ignore[arg-type]
    if error["type"] == "missing":
        return Fault("missing", str(field), words)
    if error["type"] == "value_error":  # a condition's, maybe that of an element
        words = str(error["ctx"]["error"]) or words
    return Fault("value", f"{field}[{inside[0]}]" if inside and isinstance(inside[0], int) else str(field), words)


def _sentence(fault: Fault, raw: bytes, name: str) -> str:
    match fault.kind:
        case "syntax":
            return f"{name} is not valid JSON"
        case "object":
            return f"{name} is not a JSON object"
        case "unknown":
            return f"{name} has the unknown field {fault.field[:50]!r}, expected {fault.expected}"
        case "missing":
            return f"{name}.{fault.field} is missing"
        case "value":
            field = fault.field.partition("[")[0]
            return f"{name}.{field} is {_shown(raw, field)}, expected {fault.expected}"


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
