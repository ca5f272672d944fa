"""A host with an NVIDIA GPU that lacks something says so before anything loads."""

import os
import re
from pathlib import Path

import pytest
import torch

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.generation.factory import require_host
from nemo_style_rlhf.launch import bootstrap, environment, gpu_host
from nemo_style_rlhf.schema.common import RunConfig
from nemo_style_rlhf.schema.generation import GenerationConfig

OLD = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
NEW = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
CUDA = torch.device("cuda", 0)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with a card and a driver that torch, built for CUDA 13, cannot use."""
    (tmp_path / "nvidia0").touch()
    (tmp_path / "version").write_text(OLD)
    monkeypatch.setattr(environment, "NVIDIA", (tmp_path / "nvidia0",))
    monkeypatch.setattr(gpu_host, "DEVICES", tmp_path)
    monkeypatch.setattr(gpu_host, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_a_driver_that_is_too_old_is_named_with_what_is_needed(host: Path) -> None:
    with pytest.raises(UserError) as refused:
        bootstrap._device("auto")
    assert re.fullmatch(
        r"this host has an NVIDIA GPU, but its driver is 550\.54\.15, and torch \S+ is built for CUDA 13\.0, which needs a "
        r"driver of release 580 or newer: install one; run\.device=cpu computes without it",
        str(refused.value),
    )
    with pytest.raises(UserError, match=r"run\.device=cuda but its driver is 550\.54\.15"):
        bootstrap._device("cuda")
    assert bootstrap._device("cpu") == torch.device("cpu")


def test_a_new_driver_is_not_blamed(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("No CUDA GPUs are available. Much more")

    (host / "version").write_text(NEW)
    monkeypatch.setattr(torch.cuda, "init", broken)
    with pytest.raises(UserError, match="which says: No CUDA GPUs are available: see that nvidia-smi lists it here"):
        bootstrap._device("auto")


def test_a_build_for_cpus_is_not_taken_for_a_bad_driver(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UserError, match="is built for CPUs: `make envs ACCELERATOR=cuda`"):
        bootstrap._device("auto")


def test_windows_has_neither_the_devices_nor_the_drivers_release(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (host / "nvidia0").unlink()
    (host / "version").unlink()
    (host / "dxg").touch()
    monkeypatch.setattr(environment, "NVIDIA", (host / "dxg",))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    with pytest.raises(
        UserError, match=r"see that nvidia-smi lists it here, .* and that its driver is one of release 580"
    ):
        bootstrap._device("auto")


@pytest.mark.parametrize("hides", ["variable", "container"])
def test_a_gpu_that_this_process_is_not_to_see_is_no_reason_to_refuse(
    hides: str, host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hides == "variable":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    else:
        (host / "nvidia0").rename(host / "nvidiactl")
    assert bootstrap._device("auto") == torch.device("cpu")


def test_vllm_needs_a_compiler_and_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = GenerationConfig()
    (tmp_path / "Python.h").touch()
    (compiler := tmp_path / "cc").touch(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(gpu_host.sysconfig, "get_path", lambda *_: str(tmp_path))
    require_host(config, CUDA)
    with monkeypatch.context() as without:
        without.setattr(gpu_host.sysconfig, "get_path", lambda *_: str(tmp_path / "none"))
        with pytest.raises(
            UserError, match=rf"{tmp_path}/none has no Python\.h: install the packages gcc and python3\.\d+-dev"
        ):
            require_host(config, CUDA)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(UserError, match="there is no C compiler"):
        require_host(config, CUDA)
    monkeypatch.setenv("CC", "/nowhere/gcc")
    with pytest.raises(UserError, match="CC=/nowhere/gcc is not there"):
        require_host(config, CUDA)
    require_host(GenerationConfig(backend="hf"), CUDA)
    require_host(config, torch.device("cpu"))


def test_who_does_not_choose_is_told_of_graphs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        require_host(GenerationConfig(), CUDA)
        assert caplog.text.count("generation.enforce_eager=false decodes faster") == 1
        require_host(GenerationConfig(enforce_eager=True), CUDA)
        require_host(GenerationConfig(enforce_eager=False), CUDA)
        require_host(GenerationConfig(), torch.device("cpu"))
    assert caplog.text.count("enforce_eager") == 1


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """A card that describes itself so; torch gets its own settings back."""
    says: dict[str, object] = {"get_device_capability": (9, 0), "get_device_name": "NVIDIA H100"}
    for name in says:
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: says[name])
    monkeypatch.setattr(bootstrap, "_device", lambda _: CUDA)
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    yield says
    torch.use_deterministic_algorithms(before)


def test_bits_on_a_gpu_are_asked_for_and_raise_where_there_are_none(card: dict, capsys) -> None:
    torch.set_float32_matmul_precision("high")
    bootstrap.setup(RunConfig(output_dir="unused"))
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.are_deterministic_algorithms_enabled()
    assert re.search(
        r"computing on NVIDIA H100, driver \S+; fp32 is not rounded to TF32; bits do not repeat without run\.deterministic=true",
        capsys.readouterr().err,
    )
    bootstrap.setup(RunConfig(output_dir="unused", deterministic=True))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "only kernels that repeat to the bit compute" in capsys.readouterr().err
    assert torch.are_deterministic_algorithms_enabled() and os.environ["FLASH_ATTENTION_DETERMINISTIC"] == "1"
    assert not torch.is_deterministic_algorithms_warn_only_enabled()  # flash attention's backward would stay as it is


def test_an_engine_on_a_gpu_has_kernels_of_its_own(card: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    bootstrap.setup(RunConfig(output_dir="unused", deterministic=True), samples=True)
    assert os.environ.pop("VLLM_BATCH_INVARIANT") == "1"
    assert not torch.are_deterministic_algorithms_enabled()  # vLLM's top_p sums cumulatively


def test_what_nobody_knows_to_repeat_is_refused_by_name(card: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunConfig(output_dir="unused", deterministic=True)
    card["get_device_capability"] = (7, 5)
    with pytest.raises(UserError, match=r"compute capability 8\.0 or newer, and NVIDIA H100 has 7\.5"):
        bootstrap.setup(run)
    card["get_device_capability"] = (9, 0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="does not support several ranks on GPUs, 2 were started"):
        bootstrap.setup(run)
    with pytest.raises(UserError, match=r"needs generation\.engines\.count=1"):
        require_host(GenerationConfig(), CUDA, repeatable=True)
    with pytest.raises(UserError, match=r"does not support generation\.top_p=0\.9 with generation=hf"):
        require_host(GenerationConfig(backend="hf", top_p=0.9), CUDA, repeatable=True)
