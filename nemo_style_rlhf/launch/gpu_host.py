"""Checks, before anything loads, that a host with an NVIDIA GPU has what a run needs. docs/gpu-checklist.md has the table."""

import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch.environment import has_nvidia

DRIVER = Path("/proc/driver/nvidia/version")
DEVICES = Path("/dev")
DRIVER_OF_CUDA = {"12": 525, "13": 580}
"""The oldest release of NVIDIA's driver that runs a major version of CUDA."""
REPEATABLE = (8, 0)
"""The oldest compute capability on which bits may repeat."""
COMPILERS = ("gcc", "clang")
"""The compilers that Triton looks for."""


def usable_gpu() -> bool:
    """True if runs compute on a GPU. A driver that torch cannot use never silently moves a run to the CPU.

    Raises:
        UserError: this host has a GPU that this process may see, but torch cannot use it.
    """
    if torch.cuda.is_available():
        return True
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1", "none", "NoDevFiles")
    if hidden or not (has_nvidia() and _devices()):
        return False
    raise UserError(f"this host has an NVIDIA GPU, but {unusable()}; run.device=cpu computes without it")


def unusable() -> str:
    """Explain why torch cannot use the host's GPU, and what to do."""
    built = torch.version.cuda
    if built is None:
        return f"torch {torch.__version__} in {sys.prefix} is built for CPUs: `make envs ACCELERATOR=cuda` installs one for GPUs"
    wanted, driver = DRIVER_OF_CUDA.get(built.partition(".")[0]), driver_release()
    needs = f"torch {torch.__version__} is built for CUDA {built}"
    if wanted is not None and driver is not None and float(driver.partition(".")[0]) < wanted:
        return f"its driver is {driver}, and {needs}, which needs a driver of release {wanted} or newer: install one"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        needs += f", which says: {str(error).partition('. ')[0]}"
    newer = "" if wanted is None else f" of release {wanted} or newer"
    return (
        f"{needs}: see that nvidia-smi lists it here, that a job was given one (Slurm: --gres=gpu:1), and that its "
        f"driver{f' {driver}' if driver else ''} is one{newer}"
    )


def driver_release() -> str | None:
    """The release of NVIDIA's driver, such as 580.159.04; None if it is not known, as under WSL2."""
    found = re.search(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", DRIVER.read_text()) if DRIVER.exists() else None
    return found[1] if found else None


def require_repeatable(device: torch.device) -> None:
    """Refuse GPUs on which bits may not repeat.

    Raises:
        UserError: the GPU is too old, or several ranks were started.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability < REPEATABLE:
        raise UserError(
            f"run.deterministic=true needs compute capability {_dotted(REPEATABLE)} or newer, and "
            f"{torch.cuda.get_device_name(device)} has {_dotted(capability)}: give run.deterministic=null"
        )
    if (ranks := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise UserError(
            f"run.deterministic=true does not support several ranks on GPUs, {ranks} were started: NCCL does not add in a fixed "
            "order; start one, or give run.deterministic=null"
        )


def require_compiler() -> None:
    """Require a C compiler: Triton compiles a small C file for each kernel, in vLLM also without CUDA graphs.

    Raises:
        UserError: a compiler or Python.h is missing.
    """
    debians = sysconfig.get_default_scheme() == "posix_local"  # its own paths, where Triton does not look
    headers = Path(sysconfig.get_path("include", "posix_prefix" if debians else sysconfig.get_default_scheme()))
    named = os.environ.get("CC")
    if not any(map(shutil.which, [named] if named else COMPILERS)):
        missing = f"CC={named} is not there" if named else "there is no C compiler (gcc or clang)"
    elif not (headers / "Python.h").exists():
        missing = f"{headers} has no Python.h"
    else:
        return
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    raise UserError(
        f"vLLM compiles kernels for the GPU while it runs, but {missing}: install the packages gcc and {python}-dev "
        f"({python}-devel with dnf), or use generation=hf"
    )


def _devices() -> bool:
    """True if this host, or container, has a GPU: the driver may be loaded without one. Under WSL2 it has another device."""
    return any(DEVICES.glob("nvidia[0-9]*")) or (DEVICES / "dxg").exists()


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
