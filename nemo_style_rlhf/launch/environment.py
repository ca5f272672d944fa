"""Variables that libraries read while they are imported. Standard library only."""

import os
from pathlib import Path

from nemo_style_rlhf.launch.quick_imports import make_imports_quick

NVIDIA = Path("/dev/nvidiactl")
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


def prepare() -> None:
    """Set the variables that the user has not set. Call this before torch, transformers, DeepSpeed or vLLM is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not NVIDIA.exists():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed's import warns that it finds no accelerator
    make_imports_quick()
