"""Variables that libraries read while they are imported. Standard library only."""

import os
from pathlib import Path

from nemo_style_rlhf.launch.quick_imports import make_imports_quick

NVIDIA = (Path("/dev/nvidiactl"), Path("/usr/lib/wsl/lib/libcuda.so.1"))
"""The driver's device; under WSL2, where there is none, the library that Windows brings."""
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",  # else tokenizers forks after threads have started
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process: 2 s instead of 13 s to start
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM shares its cores with training
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_CI_ENV": "1",  # no NUMA binding; several ranks may share one small machine
    "VLLM_CPU_ATTN_SPLIT_KV": "0",  # a sample's bits would depend on its batch, see generation/cpu_batches.py
    "TRITON_F32_DEFAULT": "ieee",  # else vLLM's attention rounds fp32 to 11 bits on a GPU, as nothing in training does
    # This sampler compiles kernels at its first start, its draws are not known to repeat, and it cannot return log-probabilities
    # under the sampled distribution.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # with run.deterministic, products on a GPU repeat only so
    "DS_IGNORE_CUDA_DETECTION": "1",  # no op of DeepSpeed is compiled, so nvcc may be missing
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
    if not has_nvidia():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed's import warns that it finds no accelerator
    make_imports_quick()


def has_nvidia() -> bool:
    """True if this host has NVIDIA's driver; a container may have it without a GPU."""
    return any(path.exists() for path in NVIDIA)
