"""Dependencies between rooms point one way; heavy libraries stay in the room that owns them."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "nemo_style_rlhf"
BASE = {"errors", "schema"}
ALLOWED = {
    "errors": set(),
    "algorithms": set(),
    "schema": {"errors", "algorithms"},  # names of estimators are checked against the functions that know them
    "launch": BASE,
    "distributed": BASE,
    "tracking": BASE | {"launch", "checkpoint"},
    "checkpoint": BASE,
    "models": BASE | {"checkpoint"},  # samples of files
    "data": BASE,
    "engine": BASE | {"models", "distributed", "checkpoint"},
    "generation": BASE | {"engine", "models"},
    "critic_service": BASE | {"engine", "models", "distributed", "algorithms", "checkpoint", "data", "launch"},
    "scoring": BASE | {"critic_service", "launch"},
    "rollout": BASE | {"generation", "scoring", "models", "algorithms", "data", "distributed"},
    "ppo": BASE
    | {"rollout", "engine", "checkpoint", "tracking", "algorithms", "models", "data", "generation", "scoring"}
    | {"critic_service", "launch", "distributed"},
    "planning": BASE | {"models", "data", "generation", "rollout", "distributed"},  # numbers of what it plans
    "evaluation": BASE | {"rollout", "generation", "scoring", "models", "data", "checkpoint", "launch"},
    "supervised": BASE | {"models", "data", "algorithms", "tracking", "launch", "engine", "checkpoint"},
    "programs": BASE
    | {"launch", "checkpoint", "models", "critic_service", "ppo", "supervised", "evaluation", "planning"},
}
OWNERS = {
    "vllm": {"generation"},
    "pytriton": {"critic_service"},
    "deepspeed": {"engine"},
    "requests": {"critic_service", "scoring"},
    "pytorch_lightning": {"supervised", "tracking"},
    "datasets": {"data"},
    "hydra": {"launch"},
    "jinja2": {"evaluation", "data", "schema"},
}
CLIENT_SIDE = {"protocol", "kserve", "connection", "client", "remote_critic", "remote_reward", "secret"}


def imports(path: Path) -> set[str]:
    """Dotted names that ``path`` imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_what_lies_below_it(path):
    room = room_of(path)
    for name in imports(path):
        if name.startswith("nemo_style_rlhf."):
            other = name.split(".")[1]
            assert other == room or other in ALLOWED[room], f"{room} must not import {name}"
        elif (library := name.split(".")[0]) in OWNERS:
            assert room in OWNERS[library], f"{room} must not import {library}: it belongs to {OWNERS[library]}"


@pytest.mark.parametrize("path", [PACKAGE / "algorithms", PACKAGE / "models"], ids=lambda path: path.name)
def test_the_mathematics_imports_torch_only(path):
    of_models = {"torch", "transformers", "flash_attn", "peft", "safetensors", "huggingface_hub"}
    allowed = {"algorithms": {"torch"}, "models": of_models}[path.name]
    for file in path.glob("*.py"):
        for name in imports(file):
            top = name.split(".")[0]
            assert top in allowed | {"nemo_style_rlhf"} | set(sys.stdlib_module_names), f"{file.name} imports {name}"


def test_the_client_needs_nothing_of_the_server():
    for name in CLIENT_SIDE:
        for imported in imports(PACKAGE / "critic_service" / f"{name}.py"):
            if imported.startswith("nemo_style_rlhf."):
                parts = imported.split(".")
                assert parts[1] in BASE or set(parts[2:3]) <= CLIENT_SIDE, f"{name} imports {imported}"
            assert imported.split(".")[0] not in {"torch", "deepspeed", "transformers", "pytriton"}


@pytest.mark.parametrize("environment", [".venv-server", ".venv-actor"])
def test_the_package_imports_in_both_environments(environment):
    code = (
        "import nemo_style_rlhf.schema.actor, nemo_style_rlhf.schema.critic, nemo_style_rlhf.launch.entry\n"
        "import nemo_style_rlhf.engine.engine, nemo_style_rlhf.models.loading, nemo_style_rlhf.critic_service.protocol\n"
    )
    subprocess.run([ROOT / environment / "bin" / "python", "-c", code], check=True, cwd=ROOT)
    assert (ROOT / environment).is_dir()
