"""vLLM's worker processes import this module. An engine of several devices has a worker for each."""

import torch

from nemo_style_rlhf.generation import cpu_kernels
from nemo_style_rlhf.launch.bootstrap import use_repeatable_kernels

if not torch.cuda.is_available():
    use_repeatable_kernels()
    cpu_kernels.register()


class VllmWorker:
    """A base of vLLM's worker that adds nothing: vLLM imports this module before the worker is made."""
