"""Process setup that must happen before models are loaded."""

import logging
import os
import random
import sys
import warnings

import torch

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch import interrupt
from nemo_style_rlhf.launch.collector import collect_as_usual
from nemo_style_rlhf.launch.environment import prepare
from nemo_style_rlhf.launch.gpu_host import driver_release, require_repeatable, unusable, usable_gpu
from nemo_style_rlhf.launch.malloc import keep_freed_memory
from nemo_style_rlhf.launch.starting import clear
from nemo_style_rlhf.schema.common import RunConfig

log = logging.getLogger(__name__)


def setup(run: RunConfig, *, samples: bool = False) -> torch.device:
    """Set threads, seeds, deterministic kernels, quiet libraries and torch.distributed; returns the device to compute on.

    DeepSpeed's process group must exist before vLLM's: in the other order, every rank would train alone.

    Args:
        samples: only vLLM computes here, with kernels of its own that repeat.

    Raises:
        UserError: the device cannot be used, or not with ``run.deterministic``.
    """
    clear()
    prepare()
    collect_as_usual()
    interrupt.keep_from_children()
    silence_libraries()
    logging.basicConfig(
        level=logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    if run.num_threads:
        torch.set_num_threads(run.num_threads)
    device = _device(run.device)
    random.seed(run.seed)
    torch.manual_seed(run.seed)
    repeatable = run.repeatable(device.type)
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        keep_freed_memory()
    else:
        torch.set_float32_matmul_precision("highest")
        if repeatable:
            require_repeatable(device)
        log.info(
            "computing on %s, driver %s; fp32 is not rounded to TF32; %s", torch.cuda.get_device_name(device),
            driver_release() or "unknown",
            "only kernels that repeat to the bit compute" if repeatable else "bits do not repeat without run.deterministic=true",
        )  # fmt: skip
    if repeatable and samples and device.type == "cuda":
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    elif repeatable:
        use_repeatable_kernels()
    return device


def silence_libraries() -> None:
    """Let libraries report errors only."""
    warnings.filterwarnings(
        "ignore", module=r"(torch|transformers|deepspeed|vllm|pytorch_lightning|lightning_fabric)\b.*"
    )
    for noisy in ("DeepSpeed", "torch", "transformers", "vllm", "numexpr", "absl", "urllib3", "httpx", "filelock"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


def use_repeatable_kernels() -> None:
    """Allow only kernels that repeat to the bit from now on; others raise."""
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"  # transformers asks flash-attn for it
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that writes every new tensor twice


def _device(choice: str) -> torch.device:
    if choice == "cpu" or (choice == "auto" and not usable_gpu()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(f"run.device=cuda but {unusable()}; run.device=cpu computes without it")
    local, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= found:
        raise UserError(
            f"LOCAL_RANK={local} but this process sees {found} GPUs: start at most {found} ranks on this node, or let each rank "
            "see all of its GPUs (under Slurm: no --gpus-per-task, and --gpu-bind=none)"
        )
    if found > (ranks := int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
        log.warning(
            "these %d ranks use one each of this node's %d GPUs: start more if nothing else uses the others",
            ranks,
            found,
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device
