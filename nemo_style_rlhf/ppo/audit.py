"""Did the weights arrive? The generator's log-probabilities of a fixed probe against the trainer's, after every transfer."""

from collections.abc import Sequence

import torch

from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.generation.interface import Generator, TransferError

PROBE_TOKENS = 64
MAX_GAP = {"float32": 1e-3, "bfloat16": 1.0}
"""bf16 kernels of trainer and sampler differ by 0.04 on average and 0.5 at most on peaked distributions."""


class Probe:
    """Two prompts of the run and one sequence that walks across the vocabulary."""

    def __init__(self, prompts: Sequence[Prompt], vocab_size: int, *, max_length: int, max_gap: float) -> None:
        length = min(PROBE_TOKENS, max_length - 1)  # the generator adds a token
        across = [index * vocab_size // length for index in range(length)]
        self._sequences = [prompt.token_ids[:length] for prompt in prompts if len(prompt.token_ids) > 1][:2] + [across]
        self._max_gap = max_gap

    @torch.no_grad()
    def check(self, generator: Generator, engine: Engine) -> float:
        """The largest |log-probability difference| over the probe.

        Raises:
            TransferError: it is larger than the configured gap.
        """
        gaps = []
        for sequence, sampled in zip(self._sequences, generator.sequence_logprobs(self._sequences), strict=True):
            ids = torch.tensor([sequence], device=engine.device)
            mask = torch.ones_like(ids, dtype=torch.float32)
            mask[:, -1] = 0  # the last token has no action
            trained = engine.module(ids, mask, temperature=1.0).logprobs.cpu()
            gaps.append(float((trained - sampled).abs().max()))
        gap = max(gaps)
        if not gap <= self._max_gap:
            raise TransferError(
                f"after the weight transfer the generator's log-probabilities differ from the trainer's by {gap:.3g} nats on the "
                f"probe (at most {self._max_gap:g} is expected): it does not hold the trainer's weights"
            )
        return gap
