"""Private parts of other libraries change without notice, so each is touched where a reader of the new version looks for it."""

import ast

from tests.support.paths import ROOT

PACKAGE = ROOT / "nemo_style_rlhf"
TOUCHED = {
    "DeepSpeed": {"engine/deepspeed_private.py"},
    "Lightning": {"supervised/deepspeed_strategy.py"},
    "Hydra": {"launch/entry.py"},
    "PyTriton": {"critic_service/backend.py"},
    "PyTorch": {
        "distributed/alone.py", "distributed/ranks.py", "engine/schedule.py", "engine/snapshot.py", "engine/storages.py",
        "models/cpu_linear.py", "planning/blueprint.py", "planning/tracing.py",
    },
    "Transformers": {"models/decoding.py", "models/packing.py", "models/policy.py", "models/scalar_loading.py"},
    "PEFT": {"models/lora.py"},
    "Python": {"launch/entry.py"},
    "torchmetrics": {"launch/quick_imports.py"},
    "vLLM": {"generation/cpu_batches.py", "generation/cpu_kernels.py", "generation/vllm.py"},
    "multiprocess": {"scoring/function.py"},
}  # fmt: skip
OVERRIDDEN = {"_initialize_deepspeed_train"}
"""Methods of other libraries that a class of ours replaces."""
PUBLIC = {"_exit"}
"""Documented in spite of its name."""


def private(name: str) -> bool:
    dunder = name.startswith("__") and name.endswith("__")
    return name == "__compatible_ops__" or (name.startswith("_") and not dunder and name not in PUBLIC)


def own_names(tree: ast.Module) -> set[str]:
    """Names that a file of ours defines."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return names - OVERRIDDEN


def used_names(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            names |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
    return names


def test_private_parts_of_a_library_are_touched_where_they_are_listed():
    trees = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    ours = set().union(*(own_names(tree) for tree in trees.values()))
    touching = {path for path, tree in trees.items() if any(map(private, used_names(tree) - ours))}
    assert touching == set().union(*TOUCHED.values())
