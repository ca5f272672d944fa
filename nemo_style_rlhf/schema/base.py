"""Turns a composed Hydra config into checked dataclasses.

Every default lives in a dataclass of this package; YAML files only override. Rules about one key are :class:`Bounds`. For rules
about several keys, a dataclass may define ``validate(self) -> None``. It raises :class:`UserError` with one sentence.
"""

import dataclasses
import difflib
import functools
import operator
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.renamed import hint

Schema = TypeVar("Schema")
SYNONYMS = {
    "learning_rate": "lr",
    "max_new_tokens": "generation.max_length",
    "init_kl_coef": "initial_policy_kl_penalty",
    "kl_coef": "initial_policy_kl_penalty",
    "beta": "initial_policy_kl_penalty",
    "num_generations": "samples_per_prompt",
    "rollout_batch_size": "num_rollout_samples",
    "cliprange": "ratio_eps",
    "eps_clip": "ratio_eps",
}
"""Names that other trainers give to our keys, with the ends of our names."""
SPEAKER = "speaker"
"""Metadata key of a field that holds another program's configuration: the name with which its errors begin."""


BOUNDS = "bounds"
"""Metadata key of a field's :class:`Bounds`."""


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The values that a key may have. null is always among them if the key's type includes it."""

    expected: str
    among: Collection[Any] = ()
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def hold(self, value: Any) -> bool:
        if value is None or self.among:
            return value is None or value in self.among
        limits = (self.ge, operator.ge), (self.gt, operator.gt), (self.le, operator.le), (self.lt, operator.lt)
        return all(limit is None or holds(value, limit) for limit, holds in limits)


def setting(default: Any, *, expected: str = "", among: Collection[Any] = (), **bounds: float) -> Any:
    """A field with this default and :class:`Bounds` for ``validate`` to check.

    Args:
        expected: for the error; null names the choices.
        bounds: ge, gt, le and lt.
    """
    words = expected or "one of " + ", ".join(among)
    return dataclasses.field(default=default, metadata={BOUNDS: Bounds(words, among, **bounds)})


def build(schema: type[Schema], config: DictConfig) -> Schema:
    """``config`` as an instance of the dataclass ``schema``, with every ``validate`` called, innermost first.

    Raises:
        UserError: an unknown key, a wrong type, a missing value or an impossible combination.
    """
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), config)
        if missing := sorted(OmegaConf.missing_keys(merged)):
            given = " ".join(f"{key}=..." for key in missing)
            are, it = ("is", "it") if len(missing) == 1 else ("are", "them")
            raise UserError(f"{', '.join(missing)} {are} not set: give {it} on the command line, {given}")
        instance = OmegaConf.to_object(merged)
    except MissingMandatoryValue as error:
        raise UserError(f"{error.full_key} is not set: give it on the command line, {error.full_key}=...") from error
    except OmegaConfBaseException as error:
        raise UserError(one_sentence(error, schema)) from error
    validate(instance)
    assert isinstance(instance, schema)
    return instance


def rebuilt(schema: type[Schema], recorded: Mapping[str, Any]) -> Schema:
    """The configuration that an earlier start recorded, as :func:`build` makes it.

    Raises:
        UserError: see :func:`build`.
    """
    return build(schema, OmegaConf.create(literal(recorded)))


def literal(node: Any) -> Any:
    """``node`` with all texts marked as texts, so that OmegaConf does not interpolate them."""
    if isinstance(node, Mapping):
        return {key: literal(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [literal(each) for each in node]
    return re.sub(r"(\\*)\$\{", r"\1\1\${", node) if isinstance(node, str) else node


def one_sentence(error: OmegaConfBaseException, schema: type | None = None) -> str:
    """The text of an OmegaConf error with its key, without the multi-line context. ``schema`` has the keys that the user may have
    meant by an unknown one."""
    reason = str(error).splitlines()[0].rstrip(".") + _meant(error, schema)
    key = getattr(error, "full_key", None)
    return f"configuration key {key}: {reason}" if key and str(key) not in reason else f"configuration: {reason}"


def _meant(error: OmegaConfBaseException, schema: type | None) -> str:
    """Name the new name of a renamed key; else suggest a key of the same group with nearly the name of an unknown one, else keys
    of other groups."""
    if not isinstance(error, ConfigKeyError | ConfigAttributeError):
        return ""
    every = list(keys(schema)) if schema else []
    if renamed := hint(str(error.full_key or error.key), every):
        return f": {renamed}"
    unknown = str(error.full_key or error.key).rpartition(".")[2]
    if dataclasses.is_dataclass(error.object_type):
        known = [field.name for field in dataclasses.fields(error.object_type)]
        if near := difflib.get_close_matches(unknown, known if unknown not in known else [], n=1):
            return f", did you mean {near[0]}?"
    names = {key.rpartition(".")[2] for key in every}
    wanted = SYNONYMS.get(unknown, next(iter(difflib.get_close_matches(unknown, names, n=1)), ""))
    found = [key for key in every if wanted and f".{key}".endswith(f".{wanted}")]
    return f", did you mean {' or '.join(found)}?" if found else ""


def keys(schema: type, prefix: str = "") -> Iterator[str]:
    """The full names of all keys of ``schema`` that hold a value."""
    kinds = get_type_hints(schema)
    for field in dataclasses.fields(schema):
        kind = kinds[field.name]
        if dataclasses.is_dataclass(kind):
            yield from keys(kind, f"{prefix}{field.name}.")  # type: ignore[arg-type]
        else:
            yield prefix + field.name


def validate(node: Any, prefix: str = "") -> None:
    """Check the bounds of every key of a dataclass and of all dataclasses in it, and call their ``validate``, innermost first.

    Args:
        prefix: text before the names of its fields, such as ``model.``.

    Raises:
        UserError: an impossible value or combination.
    """
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if dataclasses.is_dataclass(value) and SPEAKER in field.metadata:
            try:
                validate(value)
            except UserError as error:
                raise UserError(f"{field.metadata[SPEAKER]}: {error}") from error
        elif dataclasses.is_dataclass(value):
            validate(value, f"{prefix}{field.name}.")
        elif bounds := field.metadata.get(BOUNDS):
            require(bounds.hold(value), prefix + field.name, value, bounds.expected)
    if hasattr(node, "validate"):
        node.validate()


def idle_settings(node: Any, prefix: str = "") -> Iterator[str]:
    """A sentence for each setting that differs from its default but is not read. The dataclasses in ``node`` report them from
    ``idle``: names of fields, or of fields of fields, and the reason."""
    for name, why in node.idle() if hasattr(node, "idle") else ():
        owner, _, last = f".{name}".rpartition(".")
        holder = functools.reduce(getattr, filter(None, owner.split(".")), node)
        (field,) = (each for each in dataclasses.fields(holder) if each.name == last)
        for key, value in _changed(getattr(holder, last), _default(field), prefix + name):
            yield f"{key}={value} {why}"
    for field in dataclasses.fields(node):
        if dataclasses.is_dataclass(value := getattr(node, field.name)):
            yield from idle_settings(value, f"{prefix}{field.name}.")


def _default(field: "dataclasses.Field[Any]") -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _changed(value: Any, default: Any, key: str) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value) and type(value) is type(default):
        for field in dataclasses.fields(value):
            yield from _changed(getattr(value, field.name), getattr(default, field.name), f"{key}.{field.name}")
    elif value != default:
        yield key, value


def require(condition: bool, key: str, value: object, expected: str) -> None:
    """Raise the standard sentence for a bad value unless ``condition`` holds."""
    if not condition:
        raise UserError(f"{key}={value} is not possible: expected {expected}")


def require_choice(key: str, value: str, choices: Collection[str]) -> None:
    require(value in choices, key, value, "one of " + ", ".join(choices))
