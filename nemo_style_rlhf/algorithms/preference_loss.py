"""Losses on preference pairs."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

REWARD_MODEL_LOSSES = ("sigmoid", "logexp")


def reward_model_loss(
    chosen: Tensor, rejected: Tensor, *, margin: Tensor | float | None = None, kind: str = "sigmoid"
) -> Tensor:
    """Negative log-likelihood of the preferences under Bradley-Terry, mean over pairs.

    ``-log sigmoid(chosen - rejected - margin)`` (InstructGPT, arXiv 2203.02155, eq. 1; margin: Llama 2, arXiv 2307.09288,
    eq. 2).

    Args:
        chosen: [B] scores of the preferred responses.
        rejected: [B] scores of the others.
        margin: [B] or a number, by how much the scores should differ.
        kind: ``sigmoid``, or ``logexp``: log(1 + exp(rejected - chosen + margin)), the same number written as OpenRLHF does.

    Returns:
        A scalar, fp32 for half-precision scores.
    """
    difference = (chosen - rejected).float() if chosen.dtype in (torch.bfloat16, torch.float16) else chosen - rejected
    if margin is not None:
        difference = difference - margin
    if kind == "sigmoid":
        return -logsigmoid(difference).mean()
    if kind == "logexp":
        return torch.logaddexp(torch.zeros_like(difference), -difference).mean()
    raise ValueError(f"kind {kind!r} is unknown: expected one of {', '.join(REWARD_MODEL_LOSSES)}")
