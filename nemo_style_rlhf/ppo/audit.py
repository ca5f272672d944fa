"""What a run checks about itself: did the weights arrive, does the sampler agree, is the reward being gamed."""

import logging
from collections.abc import Mapping, Sequence

import torch

from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.generation.interface import Generator, TransferError
from nemo_style_rlhf.schema.actor import AuditConfig

log = logging.getLogger(__name__)
PROBE_TOKENS = 64
MAX_GAP = {"float32": 1e-3, "bfloat16": 1.0}
"""bf16 kernels of trainer and sampler differ by 0.04 on average and 0.5 at most on peaked distributions."""


class Probe:
    """The generator's log-probabilities against the trainer's, after every transfer, on two prompts of the run and one
    sequence that walks across the vocabulary."""

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
            trained = engine(ids, mask, temperature=1.0).logprobs.cpu()
            gaps.append(float((trained - sampled).abs().max()))
        gap = max(gaps)
        if not gap <= self._max_gap:
            raise TransferError(
                f"after the weight transfer the generator's log-probabilities differ from the trainer's by {gap:.3g} nats on the "
                f"probe (at most {self._max_gap:g} is expected): it does not hold the trainer's weights"
            )
        return gap


def audit_gap(config: AuditConfig, metrics: Mapping[str, float]) -> None:
    """Compare sampler and trainer over the whole rollout, before the update.

    Raises:
        UserError: they differ by more than ``max_logprob_gap`` and ``on_logprob_gap`` is stop.
    """
    limit = config.max_logprob_gap
    if limit is not None and (gap := metrics["train_rollouts/sampler_logprob_gap_mean"]) > limit:
        _report(
            f"train_rollouts/sampler_logprob_gap_mean={gap:.3g} is above audit.max_logprob_gap={limit:g}: the generator samples "
            "from another distribution than the one that trains",
            config.on_logprob_gap,
        )


def audit_signs(config: AuditConfig, metrics: Mapping[str, float]) -> None:
    """Compare a step's rollout with the signs of reward hacking and collapse in ``config.signs``.

    Raises:
        UserError: one is out of bounds and ``on_sign`` is stop.
    """
    for name, (low, high) in config.signs.limits().items():
        if low is None and high is None:
            continue
        value = metrics[f"train_rollouts/{name}"]
        if low is not None and value < low:
            _report(f"train_rollouts/{name}={value:.4g} is below audit.signs.min_{name}={low:g}", config.on_sign)
        if high is not None and value > high:
            _report(f"train_rollouts/{name}={value:.4g} is above audit.signs.max_{name}={high:g}", config.on_sign)


def _report(sentence: str, action: str) -> None:
    if action == "stop":
        raise UserError(f"{sentence}; the run stops, the last checkpoint holds what was learned before")
    log.warning("%s", sentence)
