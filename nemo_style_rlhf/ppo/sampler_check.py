"""Checks that sampler and trainer compute the same distribution: a probe after every weight transfer, the gap over a rollout."""

import logging
from collections.abc import Mapping, Sequence

import torch

from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.generation.interface import ProbeTarget
from nemo_style_rlhf.ppo.health import STOPPED
from nemo_style_rlhf.schema.actor import AuditConfig

log = logging.getLogger(__name__)
PROBE_TOKENS = 64
MAX_GAP = {"float32": 1e-3, "bfloat16": 1.0}
"""Largest accepted gap in nats, by dtype. On peaked distributions the bf16 kernels of trainer and sampler differ by 0.04
on average and by 0.5 at most."""


class Probe:
    """Two prompts of the run and a sequence that walks across the vocabulary. After every transfer, the generator's
    log-probabilities of these three are compared with the trainer's."""

    def __init__(self, prompts: Sequence[Prompt], vocab_size: int, *, max_length: int, max_gap: float) -> None:
        length = min(PROBE_TOKENS, max_length - 1)  # the generator adds a token
        across = [index * vocab_size // length for index in range(length)]
        self._sequences = [prompt.token_ids[:length] for prompt in prompts if len(prompt.token_ids) > 1][:2] + [across]
        self._max_gap = max_gap

    @torch.no_grad()
    def target(self, engine: Engine) -> ProbeTarget:
        """The log-probabilities that a generator with the weights of ``engine`` must compute; every rank calls this."""
        logprobs = []
        for sequence in self._sequences:
            ids = torch.tensor([sequence], device=engine.device)
            mask = torch.ones_like(ids, dtype=torch.float32)
            mask[:, -1] = 0  # the last token has no action
            logprobs.append(engine(ids, mask, temperature=1.0).logprobs.cpu())
        return ProbeTarget(tuple(map(tuple, self._sequences)), tuple(logprobs), self._max_gap)


def check_logprob_gap(config: AuditConfig, metrics: Mapping[str, float]) -> None:
    """Compare sampler and trainer over the whole rollout, before the update.

    Raises:
        UserError: they differ by more than ``max_logprob_gap`` and ``on_logprob_gap`` is stop.
    """
    limit = config.max_logprob_gap
    if limit is None or (gap := metrics["train_rollouts/sampler_logprob_gap_mean"]) <= limit:
        return
    sentence = (
        f"train_rollouts/sampler_logprob_gap_mean={gap:.3g} is above audit.max_logprob_gap={limit:g}: the generator samples "
        "from another distribution than the one that trains"
    )
    if config.on_logprob_gap == "stop":
        raise UserError(f"{sentence}; {STOPPED}")
    log.warning("%s", sentence)
