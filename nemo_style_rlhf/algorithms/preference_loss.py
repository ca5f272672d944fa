"""Losses on preferences: reward models, DPO and its relatives, KTO."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from nemo_style_rlhf.algorithms.names import DPO_LOSSES, REWARD_MODEL_LOSSES


def reward_model_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    margin: Tensor | float | None = None,
    kind: str = "sigmoid",
    centring: float = 0.0,
) -> Tensor:
    """Negative log-likelihood of the preferences under Bradley-Terry, mean over pairs.

    ``-log sigmoid(chosen - rejected - margin)`` (InstructGPT, arXiv 2203.02155, eq. 1; margin: Llama 2, arXiv 2307.09288,
    eq. 2), plus ``centring * (chosen + rejected)^2``: differences do not determine the level of the scores, and this term
    holds it at 0 (arXiv 2312.09244).

    Args:
        chosen: [B] scores of the preferred responses.
        rejected: [B] scores of the others.
        margin: [B] or a number, the difference that the scores should have.
        kind: ``sigmoid``, or ``logexp``: log(1 + exp(rejected - chosen + margin)), the same number in OpenRLHF's notation.
        centring: coefficient of the centering term; 0.01 in the paper.

    Returns:
        A scalar; fp32 if scores are in half precision.

    Raises:
        ValueError: ``kind`` is unknown.
    """
    _require_kind(kind, REWARD_MODEL_LOSSES)
    chosen, rejected = _accurate(chosen), _accurate(rejected)
    difference = chosen - rejected
    if margin is not None:
        difference = difference - margin
    if kind == "sigmoid":
        loss = -logsigmoid(difference).mean()
    else:
        loss = torch.logaddexp(torch.zeros_like(difference), -difference).mean()
    return loss + centring * (chosen + rejected).square().mean() if centring else loss


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    kind: str = "sigmoid",
) -> Tensor:
    """Direct preference optimization, mean over pairs.

    With h = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected):

    - ``sigmoid``: -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h). e = 0 is DPO (arXiv 2305.18290, eq. 7). e > 0 is
      conservative DPO (cDPO): it assumes that a share e of the pairs is labeled the wrong way round. Projects differ:
      TRL's ``robust`` subtracts the second term instead of adding it and divides by 1 - 2e (arXiv 2403.00409).
    - ``ipo``: (h - 1 / (2 beta))^2 (arXiv 2310.12036, eq. 17, where beta is called tau).

    Args:
        policy_chosen, policy_rejected: [B] log-probabilities of whole responses in nats: the sum over their tokens. For
            ``ipo`` projects differ: TRL takes the mean over tokens, since the square of a sum grows with length; OpenRLHF and
            the paper take the sum. This function works with either.
        ref_chosen, ref_rejected: [B], the same under the reference policy.
        beta: strength of the pull towards the reference.
        label_smoothing: e, from 0 to below 0.5; ``sigmoid`` only.
        kind: ``sigmoid`` or ``ipo``.

    Returns:
        A scalar, fp32 for half-precision inputs.

    Raises:
        ValueError: ``kind`` is unknown, or ``label_smoothing`` is set for ``ipo``.
    """
    _require_kind(kind, DPO_LOSSES)
    # Take both log-ratios first: they are small even if the log-probabilities of long responses are large.
    chosen = _accurate(policy_chosen) - _accurate(ref_chosen)
    rejected = _accurate(policy_rejected) - _accurate(ref_rejected)
    difference = chosen - rejected
    if kind == "ipo":
        if label_smoothing:
            raise ValueError(f"label_smoothing={label_smoothing} has no meaning for ipo: expected 0")
        return (difference - 1 / (2 * beta)).square().mean()
    loss = -logsigmoid(beta * difference)
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing * logsigmoid(-beta * difference)
    return loss.mean()


def kto_loss(
    policy_logps: Tensor,
    ref_logps: Tensor,
    kl: Tensor | float,
    labels: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Kahneman-Tversky optimization (arXiv 2402.01306, eq. 7), mean over responses.

    With the reward r = policy_logps - ref_logps and z = max(kl, 0): desirable responses cost
    ``desirable_weight * (1 - sigmoid(beta (r - z)))``, undesirable ones ``undesirable_weight * (1 - sigmoid(beta (z - r)))``.
    z is the point of reference from which gains and losses are judged; no gradient flows through it.

    Args:
        policy_logps: [B] log-probabilities of whole responses in nats: the sum over their tokens.
        ref_logps: [B], the same under the reference policy.
        kl: a number or scalar tensor, in nats: the estimate of KL(policy || reference), the mean of r over responses that
            belong to other prompts. Projects differ in the number of rows they estimate it from (TRL: one micro-batch); all
            clamp it at 0.
        labels: [B] bool, true for desirable.
        beta: rate at which the value of a gain or loss saturates: the larger, the more averse to risk.

    Returns:
        A scalar, fp32 for half-precision inputs.
    """
    rewards = _accurate(policy_logps) - _accurate(ref_logps)
    reference_point = torch.as_tensor(kl, dtype=rewards.dtype, device=rewards.device).detach().clamp(min=0)
    gains = beta * (rewards - reference_point)
    desirable = desirable_weight * torch.sigmoid(-gains)
    undesirable = undesirable_weight * torch.sigmoid(gains)
    return torch.where(labels.bool(), desirable, undesirable).mean()


def _accurate(values: Tensor) -> Tensor:
    """Cast half precision to fp32, since differences of large numbers follow."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def _require_kind(kind: str, choices: tuple[str, ...]) -> None:
    if kind not in choices:
        raise ValueError(f"kind {kind!r} is unknown: expected one of {', '.join(choices)}")
