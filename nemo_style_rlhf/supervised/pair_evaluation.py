"""Evaluates a reward model on held-out pairs: accuracy, margin and calibration, over all pairs and by subset."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from nemo_style_rlhf.algorithms.preference_loss import reward_model_loss

BINS = 10


@dataclass
class PairStatistics:
    """Figures for a set of pairs."""

    pairs: int
    accuracy: float
    """Share of pairs whose chosen response has the higher reward."""
    margin: float
    """Mean reward of the chosen response minus the rejected response's."""
    loss: float
    """Mean negative log-likelihood under Bradley-Terry, in nats; a coin flip has ln 2."""
    calibration_error: float
    """Expected calibration error (arXiv 1706.04599, eq. 3): mean |confidence - accuracy| over bins of the confidence
    sigmoid(|margin|), weighted by their numbers of pairs; 0 if, say, a confidence of 70 % is right for 70 % of the pairs."""


def pair_statistics(chosen: Tensor, rejected: Tensor) -> PairStatistics:
    """Figures from rewards [pairs]."""
    margins = (chosen - rejected).double()
    right = (margins > 0).double()
    confidence = margins.abs().sigmoid()
    bins = ((confidence - 0.5) * 2 * BINS).long().clamp(max=BINS - 1)  # confidence runs from 0.5 to 1
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add(0, bins, confidence - right).abs()
    return PairStatistics(
        pairs=len(margins),
        accuracy=float(right.mean()),
        margin=float(margins.mean()),
        loss=float(reward_model_loss(chosen.double(), rejected.double())),
        calibration_error=float(gaps.sum() / len(margins)),
    )


def evaluation(chosen: Tensor, rejected: Tensor, subsets: Sequence[str]) -> Mapping[str, object]:
    """Statistics of ``all`` pairs, and of each subset that ``subsets`` [pairs] names."""
    names = sorted(set(subsets) - {""})
    of = {name: torch.tensor([subset == name for subset in subsets]) for name in names}
    return {
        "all": asdict(pair_statistics(chosen, rejected)),
        "subsets": {name: asdict(pair_statistics(chosen[mask], rejected[mask])) for name, mask in of.items()},
    }
