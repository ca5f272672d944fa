"""Dependencies between rooms point one way; heavy libraries stay in the room that owns them; tests lie where the code does."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "nemo_style_rlhf"
UNIT = ROOT / "tests" / "unit"
NO_ROOMS = {"benchmarks", "examples"}
WHOLE_TREE = {
    "__init__.py", "conftest.py", "test_architecture.py", "test_entry_points.py", "test_guarantees.py", "test_kubernetes.py",
    "test_mutants.py", "test_private_parts.py", "test_prose.py", "test_repeatable_operators.py", "test_requirements.py",
    "test_slurm_scripts.py", "test_architecture_page.py", "test_wheel.py",
}  # fmt: skip
LONGEST_FILE = 450
"""Lines."""
NOT_OURS = {"build", "multirun", "outputs"}
"""Folders of the repository that git ignores."""
BASE = {"errors", "schema"}
ALLOWED = {
    "errors": set(),
    "algorithms": set(),
    "schema": {"errors", "algorithms"},  # names of estimators are checked against the functions that know them
    "processes": set(),
    "launch": BASE | {"processes"},
    "distributed": BASE,
    "tracking": BASE | {"processes", "launch", "checkpoint"},
    "checkpoint": BASE,
    "models": BASE | {"checkpoint"},  # samples of files
    "data": BASE,
    "agents": BASE | {"data", "processes", "launch", "wire"},
    "engine": BASE | {"models", "distributed", "checkpoint"},
    "wire": BASE | {"processes", "launch"},
    "generation": BASE | {"engine", "models", "launch", "checkpoint", "distributed"},
    "engines": BASE | {"generation", "engine", "models", "wire", "launch", "checkpoint", "distributed"},
    "critic_service": BASE
    | {"engine", "models", "distributed", "algorithms", "checkpoint", "data", "launch", "processes", "wire"},
    "scoring": BASE | {"critic_service", "wire", "launch", "processes"},
    "rollout": BASE | {"agents", "engines", "generation", "scoring", "models", "algorithms", "data", "distributed"},
    "ppo": BASE
    | {"agents"}
    | {
        "rollout",
        "engine",
        "engines",
        "checkpoint",
        "tracking",
        "algorithms",
        "models",
        "data",
        "generation",
        "scoring",
    }
    | {"critic_service", "wire", "launch", "distributed"},
    "precheck": BASE | {"data", "models", "ppo", "evaluation", "launch", "processes"},
    "planning": BASE | {"models", "data", "generation", "rollout", "distributed"},  # numbers of what it plans
    "evaluation": BASE | {"rollout", "generation", "scoring", "models", "data", "checkpoint", "launch", "processes"},
    "supervised": BASE | {"models", "data", "algorithms", "tracking", "launch", "engine", "checkpoint"},
    "conversion": BASE | {"models", "data", "engine", "checkpoint", "critic_service", "ppo", "supervised"},
    "parts": BASE
    | {"algorithms", "data", "distributed", "engine", "generation", "launch", "models", "ppo", "rollout", "scoring"},
    "watch": BASE | {"wire", "launch", "checkpoint", "tracking", "evaluation"},
    "programs": BASE
    | {"conversion", "launch", "checkpoint", "models", "critic_service", "ppo", "supervised", "evaluation", "planning"}
    | {"wire", "engines", "generation", "tracking", "watch", "precheck"},
}
OWNERS = {
    "vllm": {"generation"},
    "pytriton": {"critic_service"},
    "deepspeed": {"engine"},
    "requests": {"wire", "scoring"},
    "tornado": {"wire", "watch", "agents"},
    "duckdb": {"watch"},
    "pytorch_lightning": {"supervised", "tracking"},
    "datasets": {"data"},
    "hydra": {"launch"},
    "ray": {"launch"},
    "pyarrow": {"tracking", "data"},
    "jinja2": {"data", "schema"},
}
GENERATORS = {f"nemo_style_rlhf.generation.{name}" for name in ("vllm", "hf", "in_process")}
CLIENT_SIDE = {
    "wire": {"messages", "reading", "kserve", "connection", "secret", "sessions"},
    "checkpoint": {"names"},
    "critic_service": {"protocol", "client", "remote_critic", "remote_reward"},
}
"""Files of the client by room."""


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


def test_only_the_factory_knows_which_generators_exist():
    """The loop and everything else ask it for one, and see the interface alone; an engine's process holds one."""
    outside = [path for path in FILES if room_of(path) not in ("generation", "engines")]
    assert {path.name: found for path in outside if (found := imports(path) & GENERATORS)} == {}
    assert imports(PACKAGE / "generation" / "factory.py") & GENERATORS


@pytest.mark.parametrize("path", [PACKAGE / "algorithms", PACKAGE / "models"], ids=lambda path: path.name)
def test_the_mathematics_imports_torch_only(path):
    of_models = {"torch", "transformers", "tokenizers", "flash_attn", "peft", "safetensors", "huggingface_hub"}
    allowed = {"algorithms": {"torch"}, "models": of_models}[path.name]
    for file in path.glob("*.py"):
        for name in imports(file):
            top = name.split(".")[0]
            assert top in allowed | {"nemo_style_rlhf"} | set(sys.stdlib_module_names), f"{file.name} imports {name}"


def test_any_python_of_a_batch_host_runs_a_slurm_job():
    """Nothing that launch/slurm_job.py imports needs a package; an older Python can read the sentence that refuses it."""
    left, seen = {PACKAGE / "launch" / "slurm_job.py"}, {PACKAGE / "__init__.py"}
    ast.parse((PACKAGE / "launch" / "slurm_job.py").read_text(), feature_version=(3, 6))
    while left - seen:
        seen.add(path := (left - seen).pop())
        ast.parse(path.read_text(), feature_version=(3, 9))
        for name in imports(path):
            file = PACKAGE.parent / f"{name.replace('.', '/')}.py"
            assert file.exists() or name.split(".")[0] in {"nemo_style_rlhf", *sys.stdlib_module_names}, name
            left |= {file} if file.exists() else set()
    assert PACKAGE / "launch" / "run_certificates.py" in seen


def test_the_client_needs_nothing_of_the_server():
    for path in [PACKAGE / room / f"{name}.py" for room, names in CLIENT_SIDE.items() for name in names]:
        for imported in imports(path):
            if imported.startswith("nemo_style_rlhf."):
                room, *file = imported.split(".")[1:3]
                ours = room in CLIENT_SIDE and set(file) <= CLIENT_SIDE[room]
                assert room in BASE or ours, f"{path.name} imports {imported}"
            assert imported.split(".")[0] not in {"torch", "deepspeed", "transformers", "pytriton", "tornado"}


@pytest.mark.more
@pytest.mark.parametrize("environment", [".venv-server", ".venv-actor"])
def test_the_package_imports_in_both_environments(environment):
    code = (
        "import nemo_style_rlhf.schema.actor, nemo_style_rlhf.schema.critic, nemo_style_rlhf.launch.entry\n"
        "import nemo_style_rlhf.engine.engine, nemo_style_rlhf.models.loading, nemo_style_rlhf.critic_service.protocol\n"
        "import nemo_style_rlhf.wire.listening\n"
    )
    subprocess.run([ROOT / environment / "bin" / "python", "-c", code], check=True, cwd=ROOT)
    assert (ROOT / environment).is_dir()


def test_unit_tests_mirror_the_package():
    """A test of one room lies in the folder of its name; at the top are tests of the whole tree."""
    files = [path.relative_to(UNIT) for path in UNIT.rglob("*.py")]
    rooms = {room_of(path) for path in FILES if path.parent != PACKAGE}
    assert {path.parts[0] for path in files if len(path.parts) > 1} <= rooms | NO_ROOMS
    assert {path.name for path in files if len(path.parts) == 1} <= WHOLE_TREE


def test_no_file_is_long():
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    files = [path for folder in folders if folder.name not in NOT_OURS for path in folder.rglob("*.py")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FILE} == {}
    assert len(files) > len(FILES)


CALLS_OF_USERS = re.compile(
    r"(.*\.)?_?environment\.\w+|.*\.make|own|getattr\(environment, .*\)|load_function\(.*\)|[A-Z_]+\.load"
)
"""What is called where an environment or a reward function of a user is loaded, made or called."""


def test_a_class_name_belongs_to_one_room():
    rooms: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                rooms.setdefault(node.name, set()).add(path.relative_to(PACKAGE).parts[0])
    assert {name: where for name, where in rooms.items() if len(where) > 1} == {}


def test_code_of_users_is_called_where_its_errors_end_one_sample_alone():
    """In a worker's attempt, and in a worker's call: both turn whatever is raised into a sentence about one sample or call. What
    programs and environments ask of the policy becomes a request where it is checked."""
    called, requested = set(), set()
    for path in [
        *(PACKAGE / "agents").glob("*.py"),
        *(PACKAGE / "scoring").glob("*.py"),
        *(PACKAGE / "rollout").glob("*.py"),
    ]:
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                calls = [ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)]
                where = f"{path.parent.name}/{path.name} {function.name}"
                called |= {where for call in calls if CALLS_OF_USERS.fullmatch(call)}
                if path.name == "episodes.py" and "GenerationRequest" in calls:
                    requested.add(where)
                    assert "self._require_readable" in calls, where
    assert called == {
        "agents/attempt.py _execute", "agents/attempt.py called", "agents/attempt.py _close", "agents/worker.py load",
        "scoring/worker.py call", "scoring/worker.py load_function",
    }  # fmt: skip
    assert requested
