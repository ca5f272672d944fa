"""RNG states of the process, as one file of a checkpoint holds them."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch


def rng_states() -> dict[str, Any]:
    """Python's, NumPy's, torch's and every CUDA device's, for torch.save."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def load_rng(path: Path) -> None:
    states = torch.load(path, weights_only=False)  # our own file, its digest checked against the manifest
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"][: torch.cuda.device_count()])  # there may be fewer than then
