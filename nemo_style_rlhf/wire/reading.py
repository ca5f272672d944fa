"""Reads JSON from the network into typed messages: known fields, exact types, and one sentence about what is wrong."""

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from pydantic import ConfigDict, FailFast, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_after_validator_function

from nemo_style_rlhf.wire.messages import Array, Code, ProtocolError

LARGEST_BYTES = 16 * 2**20
SHOWN = 60
"""Maximum characters of a wrong value in an error."""
STRICT = ConfigDict(strict=True, allow_inf_nan=False)
Message = TypeVar("Message")


class _FailFast(FailFast):
    __hash__ = object.__hash__  # unions of annotations need one


Many = Annotated[list[Message], _FailFast()]
"""A list whose validation stops at its first wrong element."""


@dataclass(frozen=True)
class Expected:
    """A field's annotation: the expected value in the words of an error, and a condition beyond its type.

    The condition may raise ``ValueError(words, part)``, with other words and the wrong part of the value, such as ``.content``.
    """

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
    """A message does not match its dataclass."""

    kind: Literal["object", "unknown", "missing", "value"]
    """It is not an object, has an unknown field, lacks one, or a field has a wrong value."""
    field: str = ""
    """``prices``, or ``prices[3]`` if one element of a list is wrong."""
    expected: str = ""


Flag = Annotated[bool, Expected("true or false")]


def read(tensor: Array, kind: type[Message], name: str = "request") -> Message:
    """Read the JSON object in a BYTES [1] tensor as a dataclass, see :func:`parse`.

    Raises:
        ProtocolError: INVALID, naming the field.
    """
    if tensor.shape != (1,):
        raise _invalid(f"{name} has shape {list(tensor.shape)}, expected [1]")
    raw: bytes = tensor.item(0)
    if len(raw) > LARGEST_BYTES:
        raise _invalid(f"{name} has {len(raw)} bytes, expected at most {LARGEST_BYTES}")
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        raise _invalid(f"{name} is not valid JSON") from None
    try:
        return parse(content, kind)
    except Fault as fault:
        raise _invalid(_sentence(fault, content, name)) from None


def parse(content: Any, kind: type[Message]) -> Message:
    """Make a dataclass from the result of ``json.loads``. Fields are checked one after the other. However much is wrong, the
    first fault ends the check.

    Args:
        kind: a flat dataclass, without tuples. Its lists are :data:`Many` and its dicts ``dict[str, Any]`` with a condition, so
            that the first wrong element ends the check.

    Raises:
        Fault: an unknown field if there is one, else the first field that is missing or wrong.
    """
    if not isinstance(content, Mapping):
        raise Fault("object")
    names = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    for name in content:
        if name not in names:
            raise Fault("unknown", name, ", ".join(names))
    given = {}
    for name, (adapter, words, required) in _adapters(kind).items():  # type: ignore[arg-type]  # classes are hashable
        if name in content:
            given[name] = _validated(adapter, content[name], name, words)
        elif required:
            raise Fault("missing", name, words)
    return kind(**given)


def _validated(adapter: TypeAdapter[Any], value: Any, name: str, words: str) -> Any:
    try:
        return adapter.validate_python(value)
    except ValidationError as failure:
        (error, *_) = failure.errors(include_url=False, include_input=False)
    if error["loc"] and isinstance(error["loc"][0], int):
        name += f"[{error['loc'][0]}]"
    if error["type"] == "value_error":  # raised by a condition, perhaps an element's
        words, *part = error["ctx"]["error"].args
        name += "".join(part)
    raise Fault("value", name, words)


def _sentence(fault: Fault, content: Any, name: str) -> str:
    match fault.kind:
        case "object":
            return f"{name} is not a JSON object"
        case "unknown":
            return f"{name} has the unknown field {fault.field[:50]!r}, expected {fault.expected}"
        case "missing":
            return f"{name}.{fault.field} is missing"
        case "value":
            field = fault.field.partition("[")[0]
            return f"{name}.{field} is {_shown(content[field])}, expected {fault.expected}"


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except RecursionError:  # json.loads, some frames higher, has not raised it
        return "nested too deeply"
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


@cache
def _adapters(kind: Any) -> dict[str, tuple[TypeAdapter[Any], str, bool]]:
    """By field: its validator, the expected value in words, and True if it is required."""
    hints = get_type_hints(kind, include_extras=True)
    found = {}
    for field in fields(kind):
        hint = hints[field.name]
        noted = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Expected)]
        required = field.default is MISSING and field.default_factory is MISSING
        found[field.name] = TypeAdapter(hint, config=STRICT), noted[0].words if noted else str(hint), required
    return found


def _invalid(sentence: str) -> ProtocolError:
    return ProtocolError(Code.INVALID, sentence)
