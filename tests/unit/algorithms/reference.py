"""Slow, obvious, loop-written float64 references, and random ragged masks with gaps to hold the fast versions against."""

import math

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

many = settings(max_examples=200, deadline=None)
seeds = st.integers(0, 2**31)
unit = st.floats(0, 1)


@st.composite
def masks(draw: st.DrawFn) -> Tensor:
    """[batch, time] masks with gaps, ragged ends and sometimes an empty row, but never all zero."""
    batch, time = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    rows = draw(st.lists(st.lists(st.booleans(), min_size=time, max_size=time), min_size=batch, max_size=batch))
    mask = torch.tensor(rows, dtype=torch.float64)
    if not mask.any():
        mask[0, 0] = 1
    return mask


def assert_close(left: object, right: object) -> None:
    """Equal in float64 within 1e-9, absolute and relative."""
    torch.testing.assert_close(
        torch.as_tensor(left, dtype=torch.float64), torch.as_tensor(right, dtype=torch.float64), rtol=1e-9, atol=1e-9
    )


def noise(mask: Tensor, seed: int, *, poison: bool = True) -> Tensor:
    """Normal float64 values, NaN wherever the mask is 0: nothing there may leak."""
    values = torch.randn(mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return values.masked_fill(mask == 0, math.nan) if poison else values


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> list[list[float]]:
    """The definition as a double sum over the response tokens of each row: A_i = sum_k (gamma lam)^k delta_{i+k}."""
    result = []
    for row in range(len(mask)):
        steps = [t for t in range(mask.shape[1]) if mask[row, t]]
        deltas = []
        for i, t in enumerate(steps):
            following = float(values[row, steps[i + 1]]) if i + 1 < len(steps) else 0.0
            deltas.append(float(rewards[row, t]) + gamma * following - float(values[row, t]))
        advantages = [0.0] * mask.shape[1]
        for i, t in enumerate(steps):
            advantages[t] = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[i:]))
        result.append(advantages)
    return result


def selected(x: Tensor, mask: Tensor) -> list[float]:
    return [float(x[row, t]) for row in range(mask.shape[0]) for t in range(mask.shape[1]) if mask[row, t]]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)
