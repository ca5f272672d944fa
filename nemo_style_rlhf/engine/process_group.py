"""The process group of all ranks. It must exist before vLLM starts: vLLM would make one of a single rank."""

import logging
import os

import torch

from nemo_style_rlhf.distributed.alone import init_alone
from nemo_style_rlhf.engine import deepspeed_private


def init_distributed(device: torch.device) -> None:
    """Join the process group that torchrun's variables describe, or be a group of one."""
    import deepspeed  # type: ignore[import-untyped]
    from deepspeed.utils import logger  # type: ignore[import-untyped]

    logger.setLevel(logging.ERROR)
    deepspeed_private.compile_nothing()
    deepspeed_private.compile_no_muon()
    backend = "nccl" if device.type == "cuda" else "gloo"
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed requires it
        init_alone(backend)
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)


def require_all_ranks() -> None:
    """Call this after DeepSpeed and vLLM have started: the first of them makes the process group, and vLLM's has one rank.

    Raises:
        RuntimeError: this rank would train by itself.
    """
    started, joined = int(os.environ.get("WORLD_SIZE", "1")), torch.distributed.get_world_size()
    if joined != started:
        raise RuntimeError(
            f"{started} ranks were started but this one's process group has {joined}: init_distributed must come before vLLM"
        )
