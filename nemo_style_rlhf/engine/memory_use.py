"""Memory of this process, for the metrics that the clock and the machine decide."""

from pathlib import Path
from resource import getpagesize

import torch

GIB = 2**30


def memory() -> dict[str, float]:
    """GiB: ``rss_gib``, resident now, and on CUDA ``cuda_peak_gib``, the most that torch has held since the last call."""
    found = {"rss_gib": _resident() / GIB}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda_peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        torch.cuda.reset_peak_memory_stats()
    return found


def held_bytes() -> int:
    """Bytes that this process holds where it computes: what torch has reserved on CUDA, else what is resident."""
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else _resident()


def give_back(device: torch.device) -> None:
    """Give others the memory of a GPU that torch has freed but keeps for itself."""
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.synchronize(device)  # other streams may still use it
        torch.cuda.empty_cache()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize()
