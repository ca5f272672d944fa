"""Checks the user's paths before anything heavy is imported. A field's metadata says what its path must lead to."""

import ast
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.sources import EXPECTED_SOURCE, DataSet, matching_files

Check = Callable[[str, Any], str | None]
"""Returns the fault of a value, given the dataclass that holds it; or None."""
CHECK = "path_check"
"""The key of a :data:`Check` in a field's metadata."""


def require_paths(config: Any) -> None:
    """Raise UserError if files or folders that the process will read are missing; the sentence names all of them."""
    if problems := list(_problems(config, "", getattr(config, "unread", ()))):
        raise UserError("; ".join(problems))


def _problems(node: Any, prefix: str, unread: tuple[str, ...]) -> Iterator[str]:
    for field in dataclasses.fields(node):
        key, value = prefix + field.name, getattr(node, field.name)
        if key in unread:
            continue
        if dataclasses.is_dataclass(value):
            yield from _problems(value, f"{key}.", unread)
        elif isinstance(value, list) and value and dataclasses.is_dataclass(value[0]):
            for number, each in enumerate(value):
                yield from _problems(each, f"{key}[{number}].", unread)
        elif check := field.metadata.get(CHECK):
            for given in [value] if isinstance(value, str) else value or ():
                if given and (problem := check(given, node)):
                    yield f"{key}={given}: {problem}"


def looks_like_a_path(name: str) -> bool:
    """True if ``name`` is clearly a path, not the name of a model or data set on the hub."""
    return name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1


def model_folder(path: str, _: Any = None) -> str | None:
    """Accept a Hugging Face directory, or a hub name."""
    folder = Path(path)
    if (folder / "adapter_config.json").is_file() and not any(
        [*folder.glob("model*.safetensors"), *folder.glob("pytorch_model*.bin")]
    ):
        return (
            "it holds an adapter (adapter_config.json), not a model: merge it by `trainers/merge_lora.py ADAPTER TARGET` and "
            "give the target"
        )
    if not looks_like_a_path(path):
        return None
    if not Path(path).is_dir():
        home = "; nothing expands ~ here" if path.startswith("~") else ""
        return f"there is no such folder, give that of a saved model or a hub name{home}"
    if path.startswith((".", "/")) and not (Path(path) / "config.json").exists():
        return "there is no Hugging Face model in it (no config.json), give the folder of a saved model"
    return None


def data_source(path: str, _: Any = None) -> str | None:
    """Accept a file, a pattern of files, a folder, or a hub name."""
    data_set = DataSet.parse(path)
    if Path(path).exists() or data_set.is_folder or (data_set.may_be_on_hub and not looks_like_a_path(path)):
        return None
    return None if matching_files(path) else f"it does not exist, expected {EXPECTED_SOURCE}"


def config_source(path: str, _: Any = None) -> str | None:
    """Accept a config JSON, a folder that holds one, or a hub name."""
    if Path(path).is_file():
        return None
    return "there is no such file" if path.endswith(".json") else model_folder(path)


def existing_file(path: str, _: Any = None) -> str | None:
    return None if Path(path).expanduser().is_file() else "there is no such file"


def _python_file(section: str, what: str, kind: str) -> Check:
    """A check that the user's Python file binds ``node.name`` at its top level. Only the import shows whether that is a ``kind``
    of thing."""

    def check(path: str, node: Any) -> str | None:
        if not Path(path).is_file():
            return f"there is no such file, it must be the {what}'s Python file"
        try:
            tree = ast.parse(Path(path).read_bytes())
        except SyntaxError as error:
            return f"it cannot be imported, SyntaxError: {error.msg} (line {error.lineno})"
        except ValueError as error:  # null bytes
            return f"it is not a Python file ({error})"
        if {node.name, "*"} & set(_bound_names(tree)) or _binds_otherwise(tree):
            return None
        return f"it has no {kind} {node.name}, set {section}.name to the one it has"

    return check


def _bound_names(tree: ast.AST) -> Iterator[str]:
    """Names that statements outside of functions and classes bind."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        yield from _bound_names(node)


def _binds_otherwise(tree: ast.AST) -> bool:
    """True if a file may bind names by other means than a statement at its top level."""
    for node in ast.walk(tree):
        named = node.id if isinstance(node, ast.Name) else getattr(node, "name", None)
        if isinstance(node, ast.Global) or named in ("globals", "exec", "setattr", "__getattr__"):
            return True
    return False


function_file = _python_file("reward.function", "reward function", "function")
_environment_file = _python_file("agent", "environment", "class")


def environment_file(path: str, node: Any) -> str | None:
    """Accept a Python file with an environment; sets an empty ``node.name`` to the name of the only one."""
    if node.name == "" and Path(path).is_file():
        node.name = only_environment(Path(path)) or "Environment"
        found = environments(Path(path))
        if len(found) > 1 and node.name not in found:
            return f"it has the environments {', '.join(found)}, set agent.name to one of them"
    return _environment_file(path, node)


def only_environment(path: Path) -> str | None:
    """Name of the only environment of a file."""
    found = environments(path)
    return found[0] if len(found) == 1 else None


def environments(path: Path) -> list[str]:
    """Names of the classes in a Python file that look like environments, by their methods or their base; empty if its text does
    not show them."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return []
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    bases = {ast.unparse(base) for node in classes.values() for base in node.bases}
    imported = {
        each.asname or each.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
        for each in node.names if each.name == "Environment"
    }  # fmt: skip

    def plays(node: ast.ClassDef) -> bool:
        methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
        own = {ast.unparse(base) for base in node.bases}
        return bool(methods & {"step", "execute"}) or any(
            base.split(".")[-1] in imported | {"Environment"} for base in own
        )

    return [name for name, node in classes.items() if name not in bases and plays(node)]
