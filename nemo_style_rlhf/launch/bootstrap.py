"""Process setup that must happen before vLLM, PyTriton or DeepSpeed is imported."""

import logging
import os
import random
import sys
import warnings
from pathlib import Path

import torch

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch import interrupt
from nemo_style_rlhf.launch.malloc import keep_freed_memory
from nemo_style_rlhf.schema.common import RunConfig

log = logging.getLogger(__name__)
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",  # else tokenizers forks after threads have started
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process: 2 s instead of 13 s to start
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM shares its cores with training
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_CI_ENV": "1",  # no NUMA binding; several ranks may share one small machine
    "VLLM_CPU_ATTN_SPLIT_KV": "0",  # a sample's bits would depend on its batch, see generation/cpu_batches.py
    "DS_SKIP_CUDA_CHECK": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # After Ctrl-C, or if Triton must be killed, Python unlinks their shared memory, and would say so at length.
    "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker",
}


def setup(run: RunConfig) -> torch.device:
    """Set threads, seeds, deterministic kernels, quiet libraries and torch.distributed; returns the device to compute on.

    DeepSpeed's process group must exist before vLLM's: in the other order, every rank would train alone.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    interrupt.keep_from_children()
    warnings.filterwarnings(
        "ignore", module=r"(torch|transformers|deepspeed|vllm|pytorch_lightning|lightning_fabric)\b.*"
    )
    logging.basicConfig(
        level=logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    for noisy in ("DeepSpeed", "torch", "transformers", "vllm", "numexpr", "absl", "urllib3", "httpx", "filelock"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    if run.num_threads:
        torch.set_num_threads(run.num_threads)
    device = _device(run.device)
    random.seed(run.seed)
    torch.manual_seed(run.seed)
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        use_repeatable_kernels()
        keep_freed_memory()
    return device


def use_repeatable_kernels() -> None:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that writes every new tensor twice


def _device(choice: str) -> torch.device:
    if choice == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "run.device=cuda but torch sees no CUDA device: use run.device=cpu, or install a CUDA build (make envs)"
        )
    if choice == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if Path("/dev/nvidia0").exists():
            log.warning("this machine has a GPU that torch %s cannot use: the run is on the CPU", torch.__version__)
        return torch.device("cpu")
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
